"""What a browser is given at /console: from the package, complete, and with a policy that lets nothing else run."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch

from gateway.console import pages
from tests.builders import ROOT

MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|\sstyle=")
FOLDER = ROOT / "gateway" / "console" / "assets"


async def test_the_page_and_all_that_it_loads_are_served_with_their_types_and_a_policy(front):
    for name, asset in pages.assets().items():
        path = "/console" if name == "index.html" else f"/console/assets/{name}"
        async with front.http.get(front.url + path) as answer:
            assert (answer.status, await answer.read()) == (200, asset.body), name
            assert answer.content_type == pages.TYPES[name.rpartition(".")[2]]
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy
            for word in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
                assert word in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            etag = answer.headers["etag"]
        async with front.http.get(front.url + path, headers={"if-none-match": etag}) as answer:
            assert (answer.status, await answer.read()) == (304, b"")
    async with front.http.get(front.url + "/console/") as answer:
        assert answer.status == 200


async def test_nothing_else_is_served_there(front):
    for name in ("none.js", "../pages.py", "..%2Fpages.py", "vendor/", ".", "index.html%00"):
        async with front.http.get(f"{front.url}/console/assets/{name}") as answer:
            assert answer.status == 404, name


def test_all_of_it_is_in_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["gateway"]
    found = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {str(path.relative_to(FOLDER)) for path in found} == set(pages.assets())
    for path in found:
        assert any(fnmatch(str(path.relative_to(ROOT / "gateway")), pattern) for pattern in patterns), path
    assert (FOLDER / "vendor" / "uplot-licence.txt").exists()


def test_no_page_needs_anything_from_elsewhere_or_makes_markup_of_text():
    for path in FOLDER.rglob("*"):
        if path.suffix not in (".js", ".html", ".css") or path.parent.name == "vendor":
            continue
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not MARKUP.search(text), path
        for name in re.findall(r'from "(\.[^"]+)"', text):
            assert (path.parent / name).resolve().exists(), (path, name)
