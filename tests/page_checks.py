"""What a reader's browser must not find in a report: a script measures the drawn page and names every fault.

Checks every chart (marks there, everything inside its drawing, no two texts on each other) and the page around it
(nothing wider than the window, no text outside its box, no box on another). Closed ``details`` are opened first.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from browser import Browser, Page

SCRIPT = r"""
(() => {
  document.querySelectorAll('details').forEach(one => { one.open = true; });
  const faults = [], say = (what, where) => faults.push(what + ': ' + where);
  const inside = (a, b, slack) => a.left >= b.left - slack && a.right <= b.right + slack &&
    a.top >= b.top - slack && a.bottom <= b.bottom + slack;
  // shares of the smaller box: line boxes touch without their letters touching
  const onEachOther = (a, b) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    return wide > 1 && high > 0.25 * Math.min(a.height, b.height);
  };
  const pairs = (all, name, what) => all.forEach((one, i) => all.slice(i + 1).forEach(two => {
    if (onEachOther(one.getBoundingClientRect(), two.getBoundingClientRect()))
      say(what, name + ' "' + one.textContent.slice(0, 40) + '" and "' + two.textContent.slice(0, 40) + '"');
  }));
  const charts = [...document.querySelectorAll('svg')];
  charts.forEach((chart, index) => {
    const name = chart.getAttribute('aria-label') || 'chart ' + index, box = chart.getBoundingClientRect();
    if (box.width < 100 || box.height < 60) say('tiny chart', name + ' ' + box.width + ' x ' + box.height);
    const marks = [...chart.querySelectorAll('path, circle, polygon, rect')].filter(one => {
      const style = getComputedStyle(one), size = one.getBoundingClientRect();
      return (style.fill !== 'none' || style.stroke !== 'none') && style.visibility === 'visible' &&
        size.width + size.height > 2;
    });
    if (!marks.length) say('no marks', name);
    chart.querySelectorAll('path, circle, polygon, rect, line, text').forEach(one => {
      if (!inside(one.getBoundingClientRect(), box, 1.5)) say('outside its drawing',
        name + ' <' + one.tagName + '> ' + one.textContent.slice(0, 40));
    });
    pairs([...chart.querySelectorAll('text')], name, 'texts on each other');
  });
  const root = document.documentElement;
  if (root.scrollWidth > window.innerWidth) say('wider than the window', root.scrollWidth + ' > ' + window.innerWidth);
  const scrolls = one => one.closest('.box, pre') !== null;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.textContent.trim() || scrolls(parent) || parent.closest('svg, style')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const frame = (parent.closest('.card, .tile') || document.body).getBoundingClientRect();
    for (const box of range.getClientRects())
      if (box.width && !inside(box, frame, 1.5)) { say('text outside its box', node.textContent.slice(0, 60)); break; }
  }
  pairs([...document.querySelectorAll('.card, .tile, .box, h2, p.lead')].filter(
    one => !one.parentElement.closest('.card')), 'page', 'boxes on each other');
  return {faults, charts: charts.length};
})()
"""


def check_page(browser: Browser, path: Path, width: int, *, dark: bool = False) -> tuple[Page, int]:
    """The drawn page and its number of charts.

    Raises:
        AssertionError: a message in the console, a request beyond the file itself, or a fault in the layout; all named.
    """
    page = browser.open(path, width, dark=dark)
    found = page.evaluate(SCRIPT)
    problems = [f"console: {one}" for one in page.messages]
    problems += [f"request: {url}" for url in page.requests if url != path.resolve().as_uri()]
    problems += found["faults"]
    assert not problems, f"{path} at {width} pixels:\n" + "\n".join(problems[:30])
    return page, found["charts"]


def num_byte_values(png: Path) -> int:
    """Distinct bytes in the pixels of a PNG (as filtered): a blank page has a handful, a drawn one nearly all."""
    content, position, pixels = png.read_bytes(), 8, b""
    while position < len(content):
        length, kind = int.from_bytes(content[position : position + 4], "big"), content[position + 4 : position + 8]
        pixels += content[position + 8 : position + 8 + length] if kind == b"IDAT" else b""
        position += 12 + length
    return len(set(zlib.decompress(pixels)))
