"""What panels have in common, and the PromQL that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders.common import StackingConfig
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef

SOURCE = DataSourceRef(type_val="prometheus", uid="$source")


@dataclass(frozen=True)
class Chart:
    """`queries`: PromQL -> legend. `width`: of 24 columns."""

    title: str
    unit: str
    queries: dict[str, str]
    says: str = ""
    width: int = 8
    stacked: bool = False
    below_zero: bool = False

    def panel(self) -> Panel:
        made = Panel().title(self.title).unit(self.unit).description(self.says).datasource(SOURCE)
        made = made.span(self.width).height(8).fill_opacity(20 if self.stacked else 5)
        if not self.below_zero:
            made = made.min(0)
        for query, legend in self.queries.items():
            made = made.with_target(Dataquery().expr(query).legend_format(legend).range())
        if self.stacked:
            made = made.stacking(StackingConfig().mode(StackingMode.NORMAL))
        return made


Rows = dict[str, tuple[Chart, ...]]


def rate(counter: str, by: str = "", labels: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(kvferry:{counter}{{{labels}}}[$__rate_interval]))"


def quantiles(histogram: str, labels: str = "", of: Sequence[float] = (0.5, 0.95, 0.99)) -> dict[str, str]:
    buckets = f"sum by (le) (rate(kvferry:{histogram}_bucket{{{labels}}}[$__rate_interval]))"
    return {f"histogram_quantile({q}, {buckets})": f"p{100 * q:g}" for q in of}


def mean(histogram: str, labels: str = "") -> str:
    return f"{rate(f'{histogram}_sum', labels=labels)} / {rate(f'{histogram}_count', labels=labels)}"


def within(histogram: str, seconds: float) -> str:
    """The share of observations up to `seconds`, which must be one of its buckets."""
    inside = rate(f"{histogram}_bucket", labels=f'le="{seconds}"')
    return f"{inside} / {rate(f'{histogram}_count')}"
