"""``tpcore plan --html``: one file with its data, and what a browser shows of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_plan import command, folder

SIZES = "--devices", "2", "--batch", "4", "--seq-len", "16"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_one_file_has_plans_for_all_places_of_the_sliders(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = command(folder(tmp_path), *SIZES, "--html", str(page), "--json")
    assert (done.exit_code, done.stderr) == (0, f"saved as {page}\n"), done.output
    text = page.read_text()
    assert not re.search(r"https?:|src=|<link|@import", text)
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["asked"] == {"devices": 2, "batch": 4, "seq_len": 16}
    assert (data["devices"], data["batch"], data["seq_len"]) == ([1, 2, 4, 8], [1, 2, 4, 8, 16], [8, 16, 32])
    assert len(data["plans"]) == 4 * 5 * 3
    asked = json.loads(done.stdout)["plans"]
    shown = data["plans"]["2/4/16"]
    assert shown["fit"] == len(asked)
    assert [row["memory"] for row in shown["rows"]] == [row["memory"] for row in asked[:10]]
    assert data["plans"]["8/1/16"]["refused"]  # 1 example for 8 devices


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert command(folder(tmp_path), *SIZES, "--html", str(page)).exit_code == 0
    # what moves a slider, after the page's own script, and measures the bars
    moved = """<script>const s = $("[name=devices]"); s.value = 0; s.dispatchEvent(new Event("input"));
        const off = (i) => i.offsetWidth - (parseFloat(i.style.width) / 100) * i.parentNode.clientWidth;
        document.title = [...document.querySelectorAll(".bar i")].every((i) => Math.abs(off(i)) < 1) ? "true" : "bent";
        </script>"""
    texts = []
    for extra in ("", moved):
        page.write_text(page.read_text() + extra)
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path / 'user'}"]
        done = subprocess.run(
            [str(BROWSER), *words, page.as_uri()], capture_output=True, text=True, check=True, timeout=120
        )
        texts.append(done.stdout)
    asked, one = texts
    assert asked.count('class="row"') == 10
    assert "<output>2</output>" in asked
    assert "<output>1</output>" in one
    assert "<title>true</title>" in one  # each part as long as its number
    assert re.search(r">(1 plan|(?!1 )\d+ plans) fit; the fastest: ", one)
    assert asked.partition("<main>")[2] != one.partition("<main>")[2]
