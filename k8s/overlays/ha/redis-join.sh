#!/bin/sh
# Keeps this pod's Redis a master of the cluster: it has met the others, and a fixed share of the slots is its own.
# Nothing that matters is in Redis, so whoever has the name has the slots, whatever an empty one's predecessor still holds,
# and one that has lost them begins anew.
#   POD_NAME  ends in its ordinal: -0, -1, …
#   PEERS     host:port of all, by ordinal; each is asked there who it is and which address it announces
#   SELF      host:port of its own Redis, which need not be known by name yet
#   EVERY_S   seconds from one look to the next
set -u
trap 'exit 0' TERM INT

ask() {  # HOST:PORT WORD…: the reply; nothing from one that does not answer
    where=$1
    shift
    timeout 3 redis-cli -h "${where%:*}" -p "${where##*:}" "$@" 2>/dev/null
}

tell() {  # WORD…: to its own Redis, and into the log
    printf '%s: %s\n' "$*" "$(ask "$SELF" "$@")"
}

field() {  # NODES NUMBER: of the line of the one that was asked
    printf '%s\n' "$1" | awk -v number="$2" '$3 ~ /myself/ { print $number }'
}

owns_share() {  # NODES: [slots] are on their way
    printf '%s\n' "$1" | awk -v first="$first" -v last="$last" '
        $3 ~ /myself,master/ {
            for (i = 9; i <= NF; i++) {
                end = split($i, run, "-")
                if ($i !~ /^\[/ && run[1] <= first && run[end] >= last) found = 1
            }
        }
        END { exit !found }'
}

take_share() {  # as a new node, with an epoch above all that the others know: they believe the highest
    ask "$SELF" flushall >/dev/null  # a master with keys is not reset; a replica is, and refuses this
    printf '%s\n' MULTI "CLUSTER RESET HARD" "CLUSTER ADDSLOTS $(seq -s ' ' "$first" "$last")" \
        "CLUSTER SET-CONFIG-EPOCH $((epoch + 1))" EXEC | ask "$SELF" >/dev/null
    echo "took slots $first to $last with epoch $((epoch + 1))"
}

look() {
    mine=$(ask "$SELF" cluster nodes) || return 0  # it is not up yet
    me=$(field "$mine" 1)
    [ -n "$me" ] || return 0
    ids= answered=0 epoch=0 others= strangers=
    for peer in $PEERS; do
        theirs=$(ask "$peer" cluster nodes) || continue
        id=$(field "$theirs" 1)
        case " $ids " in *" $id "*) continue ;; esac  # a name that still leads to another pod, or no reply
        ids="$ids $id" answered=$((answered + 1))
        epoch=$(printf '%s\n' "$theirs" | awk -v most="$epoch" '$7 > most { most = $7 } END { print most }')
        [ "$id" != "$me" ] || continue
        address=$(field "$theirs" 2)
        others="$others ${address%%@*}"
        printf '%s\n' "$mine" | grep -q "^$id " || strangers="$strangers ${address%%@*}"
    done
    if ! owns_share "$mine"; then
        [ -n "$others" ] || return 0  # nobody to tell which epochs there are
        take_share
        strangers=$others answered=0
    fi
    for address in $strangers; do
        tell cluster meet "${address%:*}" "${address##*:}"
    done
    [ "$answered" -eq "$num" ] || return 0
    printf '%s\n' "$mine" | while read -r id _ flags _; do  # all have answered: who is none of them is no more
        case " $ids $flags" in
            *" $id "* | *handshake*) ;;
            *) tell cluster forget "$id" ;;
        esac
    done
}

num=$(echo "$PEERS" | wc -w)
ordinal=${POD_NAME##*-}
first=$((ordinal * 16384 / num))
last=$(((ordinal + 1) * 16384 / num - 1))
while :; do
    look
    sleep "$EVERY_S" &
    wait $!
done
