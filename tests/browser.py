"""Pages as a browser lays them out, at the widths of a phone, a tablet and a screen."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

WIDTHS = (400, 800, 1400)
MEASURE = """<pre></pre><script>
const found = [], box = e => e.getBoundingClientRect();
function measure(name, page) {
  const tell = (...what) => found.push([name, ...what].join(": "));
  const {scrollWidth, clientWidth} = page.documentElement;
  if (scrollWidth > clientWidth) tell("wider than its window");
  for (const svg of page.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim());
    texts.forEach((text, n) => {
      const a = box(svg), b = box(text);
      if (b.left < a.left - 1 || b.right > a.right + 1 || b.bottom > a.bottom + 1)
        tell("outside its chart", text.textContent);
      if (b.height < 9.9) tell("too small", text.textContent);
      for (const other of texts.slice(n + 1)) {
        const c = box(other);
        if (Math.min(b.right, c.right) - Math.max(b.left, c.left) > 2
            && Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top) > 2)
          tell("overlap", text.textContent, other.textContent);
      }
    });
  }
}
window.onload = () => {
  for (const frame of document.querySelectorAll("iframe"))
    measure(frame.name, frame.contentDocument);
  document.querySelector("pre").textContent = JSON.stringify(
    [document.querySelector("iframe").contentDocument.title, found]);
};
</script>"""


def browser() -> str | None:
    """The command of a browser; None where there is none."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def laid_out(pages: Mapping[str, str], folder: Path) -> tuple[str, list[str]]:
    """The title of the first page, and what is wrong with any at any of :data:`WIDTHS`: wider than
    its window, text outside its chart, too small, or over other text. Skips the test where there is
    no browser."""
    if (command := browser()) is None:
        pytest.skip("no browser")
    frames = (
        f'<iframe name="{name} at {width}" width={width} height=800 srcdoc="{html.escape(page)}">'
        "</iframe>"
        for name, page in pages.items()
        for width in WIDTHS
    )
    (file := folder / "frames.html").write_text("<!DOCTYPE html>" + "".join(frames) + MEASURE)
    words = [command, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    words += [f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    dom = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
    title, found = json.loads(html.unescape(re.findall("<pre>(.*?)</pre>", dom)[-1]))
    return title, found
