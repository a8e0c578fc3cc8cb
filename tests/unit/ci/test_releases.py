"""The releases of Python that the project, its Makefile and the page of releases name."""

import re
from importlib.metadata import metadata

from ci.releases import PAGE


def test_the_metadata_make_and_the_page_name_the_same_releases_of_python() -> None:
    low, high = sorted(re.findall(r"3\.(\d+)", str(metadata("ddpopt")["Requires-Python"])))
    make = PAGE.parents[1].joinpath("Makefile").read_text(encoding="utf-8")
    assert f"not (3, {low}) <= sys.version_info < (3, {high})" in make
    assert f"needs Python 3.{low} to 3.{int(high) - 1}," in make
    assert f"| Python | 3.{low} to 3.{int(high) - 1}. pip refuses others" in PAGE.read_text(encoding="utf-8")
