"""Images under the names that compose/ uses, on machines that can pull none: made of Debian's own packages.

They hold the same programs at the same places, and users of the same ids; versions are Debian's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compose.stack import docker

_APT = "RUN apt-get update && apt-get install -y --no-install-recommends"
_REDIS = f"""
RUN groupadd -r -g 999 redis && useradd -r -g redis -u 999 redis
{_APT} redis-server redis-tools
"""
_PROMETHEUS = f"""
{_APT} prometheus wget && install -d -o 65534 -g 65534 /prometheus
USER nobody
ENTRYPOINT ["/bin/prometheus"]
"""
_RECIPES = {"redis": _REDIS, "prom/prometheus": _PROMETHEUS}


def ensure(image: str, base_image: str) -> None:
    """Leaves `image` as it is when it is there, else pulls it, else makes a stand-in. Raises RuntimeError."""
    if _is_here(image) or docker("pull", "--quiet", image, check=False).returncode == 0:
        return
    print(f"{image} cannot be pulled: making a stand-in", file=sys.stderr, flush=True)
    if image == base_image:
        _bootstrap(image)
        return
    recipe = _RECIPES.get(image.partition(":")[0])
    if recipe is None:
        raise RuntimeError(
            f"{image} can neither be pulled nor be made here: there are recipes for {', '.join(_RECIPES)}"
        )
    ensure(base_image, base_image)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "Dockerfile").write_text(f"FROM {base_image}\n{recipe}")
        docker("build", "--quiet", "--tag", image, folder)


def _is_here(image: str) -> bool:
    return docker("image", "inspect", image, check=False).returncode == 0


def _bootstrap(image: str) -> None:
    """A minimal Debian 12 with its Python 3.11."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
        command = ("debootstrap", "--variant=minbase", packages, "bookworm", str(root))
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as exc:
            raise RuntimeError(f"a stand-in for {image} needs debootstrap: apt-get install debootstrap") from exc
        except subprocess.CalledProcessError as exc:
            raise RuntimeError(f"debootstrap failed: {exc.stdout[-2000:]}") from exc
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        with subprocess.Popen(("tar", "-C", str(root), "-c", "."), stdout=subprocess.PIPE) as tar:
            docker("import", "-", image, stdin=tar.stdout)
