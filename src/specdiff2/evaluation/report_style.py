"""Style sheet and page frame of the report: one file, no network, no script.

Light and dark follow ``prefers-color-scheme``. Series colours keep a contrast of at least 3:1 against the page in
both modes and stay apart under the common colour-vision deficiencies (blue / vermilion / green / purple / ochre
with different lightness, after Okabe & Ito; four more for reports of many methods, told apart by marker as well).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark;
  --page:#f6f7f9; --card:#ffffff; --ink:#18202b; --muted:#596474; --rule:#dfe3e9; --grid:#e8ebf0; --axis:#8a94a3;
  --accent:#0b5fa5; --good:#0a6e50; --bad:#b3341a; --head:#f0f2f6; --streak:#cfe3f7; --streak2:#d6efe4;
  --inside:#ffffff;
  --c0:#6b7585; --c1:#0b62ab; --c2:#c24e0a; --c3:#0a7a5a; --c4:#8a3f9c; --c5:#856a00;
  --c6:#007c91; --c7:#b3246f; --c8:#7a4b2a; --c9:#5046b8;
  --shadow:0 1px 2px rgba(20,30,50,.05), 0 2px 10px rgba(20,30,50,.05); }
@media (prefers-color-scheme: dark) { :root {
  --page:#0f1319; --card:#171c24; --ink:#e7ebf1; --muted:#9ca7b6; --rule:#2a323e; --grid:#252c37; --axis:#667182;
  --accent:#7ab8f5; --good:#5fd0a6; --bad:#ff9072; --head:#1d232d; --streak:#1d4469; --streak2:#17493a;
  --inside:#10151c;
  --c0:#98a3b3; --c1:#6db3f8; --c2:#ff9f5a; --c3:#4fcb9f; --c4:#d59be6; --c5:#dcc04a;
  --c6:#4fd0e6; --c7:#ff8fc0; --c8:#d8a77f; --c9:#a9a1ff;
  --shadow:none; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--ink); font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
  "Helvetica Neue",Arial,sans-serif; -webkit-text-size-adjust:100%; }
main { max-width:1200px; margin:0 auto; padding:36px 24px 72px; }
header h1 { font-size:1.9rem; line-height:1.2; margin:0 0 6px; letter-spacing:-.015em; }
header p { margin:0; color:var(--muted); overflow-wrap:anywhere; }
h2 { font-size:1.28rem; margin:48px 0 6px; letter-spacing:-.01em; }
h3 { font-size:1rem; margin:0 0 2px; }
h3.group { color:var(--muted); font-size:.95rem; margin:22px 2px 8px; }
p.lead { margin:0 0 16px; color:var(--muted); max-width:76ch; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:14px; margin:26px 0 0; }
.tile,.card { background:var(--card); border:1px solid var(--rule); border-radius:12px; box-shadow:var(--shadow); }
.tile { padding:14px 16px; }
.tile b { display:block; font-size:1.55rem; line-height:1.25; letter-spacing:-.02em;
  font-variant-numeric:tabular-nums; }
.tile span { color:var(--muted); font-size:.86rem; line-height:1.4; display:block; }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr)); gap:18px; }
.card { padding:18px 20px; min-width:0; }
.cards + .cards, .card + .card, .box + .cards, .cards + .box, .box + .box { margin-top:18px; }
.cards > .card { margin-top:0; }
.card p.note { color:var(--muted); font-size:.88rem; margin:2px 0 12px; }
.card h3 + svg { margin-top:10px; }
.box { overflow-x:auto; background:var(--card); border:1px solid var(--rule); border-radius:12px;
  box-shadow:var(--shadow);
  -webkit-overflow-scrolling:touch; }
table { border-collapse:separate; border-spacing:0; width:100%; font-size:.92rem; font-variant-numeric:tabular-nums; }
th,td { padding:10px 10px; text-align:right; white-space:nowrap; border-top:1px solid var(--rule); }
thead th { border-top:0; background:var(--head); color:var(--muted); font-weight:600; font-size:.82rem;
  vertical-align:bottom; white-space:normal; line-height:1.35; }
th:first-child,td:first-child,td.text,th.text { text-align:left; }
th:first-child,td:first-child { padding-left:16px; } th:last-child,td:last-child { padding-right:16px; }
td small { display:block; color:var(--muted); font-size:.8rem; }
tr.best td { font-weight:650; } tr.best td small { font-weight:400; }
.swatch { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:9px; vertical-align:-.5px; }
.foot { color:var(--muted); font-size:.88rem; margin:10px 2px 0; max-width:84ch; }
.missing { color:var(--muted); border:1px dashed var(--axis); border-radius:12px; padding:14px 18px; margin:8px 0 0; }
.good { color:var(--good); } .bad { color:var(--bad); }
svg { display:block; width:100%; height:auto; max-width:620px; margin:0 auto; font-family:inherit; }
svg text { font-size:13px; fill:var(--ink); }
svg .tick,svg .axis-title,svg .mark-label { fill:var(--muted); }
svg .tick { font-size:12px; font-variant-numeric:tabular-nums; }
svg .grid { stroke:var(--grid); stroke-width:1; } svg .axis { stroke:var(--axis); stroke-width:1; }
svg .mark { stroke:var(--axis); stroke-width:1.4; stroke-dasharray:4 4; } svg .mark-label { font-size:12px; }
svg .line { fill:none; stroke-width:2.4; stroke-linejoin:round; stroke-linecap:round; }
svg .raw { fill:none; stroke-width:1; opacity:.28; } svg .leader { stroke-width:1; opacity:.6;
  stroke-dasharray:2 3; }
svg .error { stroke-width:1.4; opacity:.75; }
svg .point { stroke:var(--card); stroke-width:1.3; } svg .whisker { stroke:var(--ink); stroke-width:1.6; }
svg .name { font-weight:600; } svg .name.ink { fill:var(--ink); }
svg .value { font-weight:600; font-variant-numeric:tabular-nums; }
svg .hollow { fill:var(--card); stroke-width:1.6; }
svg .inside { fill:var(--inside); font-size:12px; font-weight:600; }
.s0{stroke:var(--c0)} .s1{stroke:var(--c1)} .s2{stroke:var(--c2)}
.s3{stroke:var(--c3)} .s4{stroke:var(--c4)} .s5{stroke:var(--c5)}
.s6{stroke:var(--c6)} .s7{stroke:var(--c7)} .s8{stroke:var(--c8)} .s9{stroke:var(--c9)}
svg .f0{fill:var(--c0)} svg .f1{fill:var(--c1)} svg .f2{fill:var(--c2)} svg .f3{fill:var(--c3)}
svg .f4{fill:var(--c4)} svg .f5{fill:var(--c5)} svg .f6{fill:var(--c6)} svg .f7{fill:var(--c7)}
svg .f8{fill:var(--c8)} svg .f9{fill:var(--c9)}
.b0{background:var(--c0)} .b1{background:var(--c1)} .b2{background:var(--c2)} .b3{background:var(--c3)}
.b4{background:var(--c4)} .b5{background:var(--c5)} .b6{background:var(--c6)} .b7{background:var(--c7)}
.b8{background:var(--c8)} .b9{background:var(--c9)}
.prompt { color:var(--muted); white-space:pre-wrap; overflow-wrap:anywhere; border-left:3px solid var(--rule);
  padding:2px 0 2px 14px; margin:10px 0 16px; font-size:.94rem; }
.gen { white-space:pre-wrap; overflow-wrap:anywhere; line-height:2; margin:8px 0 0; font-size:.97rem; }
.acc { background:var(--streak); padding:3px 0; } .round:nth-child(even) .acc { background:var(--streak2); }
.acc:first-child { border-radius:4px 0 0 4px; padding-left:2px; }
.bonus { outline:1.5px solid var(--axis); outline-offset:-1px; border-radius:4px; padding:3px 2px; margin:0 1px;
  box-decoration-break:clone; -webkit-box-decoration-break:clone; }
.break { color:var(--muted); font-size:.85em; }
.key { display:flex; flex-wrap:wrap; gap:6px 20px; color:var(--muted); font-size:.88rem; margin:0 0 14px; }
.key span { padding:1px 6px; color:var(--ink); }
dl { display:grid; grid-template-columns:minmax(110px,max-content) 1fr; gap:8px 22px; margin:0; }
dt { color:var(--muted); } dd { margin:0; overflow-wrap:anywhere; }
dl.glossary dt { color:var(--ink); font-weight:600; }
code,pre { font:.9em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
pre { overflow-x:auto; margin:10px 0 0; padding:12px 14px; background:var(--head); border-radius:8px;
  font-size:.8rem; }
details { margin-top:14px; } summary { cursor:pointer; color:var(--accent); }
summary:focus-visible { outline:2px solid var(--accent); outline-offset:3px; border-radius:4px; }
@media (max-width:600px) { main { padding:24px 14px 48px; } header h1 { font-size:1.5rem; } .card { padding:14px; }
  th:first-child,td:first-child { position:sticky; left:0; background:var(--card); }
  thead th:first-child { background:var(--head); }
  .tiles { grid-template-columns:1fr 1fr; gap:10px; } .tile { padding:12px; } .tile b { font-size:1.3rem; }
  h2 { margin-top:38px; } th,td { padding:9px 11px; } dl { grid-template-columns:1fr; gap:1px; }
  dd { margin-bottom:9px; }
  svg text { font-size:15px; } svg .tick,svg .mark-label,svg .inside { font-size:14px; } }
@media print { body { background:#fff; } .card,.box,.tile { break-inside:avoid; box-shadow:none; } }
"""


def page(title: str, subtitle: str, body: Sequence[str]) -> str:
    """A whole HTML document; ``title`` and ``subtitle`` are escaped here, ``body`` is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, lead: str, *parts: str) -> str:
    """A headed section; ``lead`` is plain text, ``parts`` are HTML."""
    head = f'<h2>{escape(title)}</h2>\n<p class="lead">{escape(lead)}</p>'
    return "\n".join(["<section>", head, *parts, "</section>"])


def card(title: str, note: str, content: str) -> str:
    """A framed drawing or text with a heading and one line about it."""
    remark = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<div class="card"><h3>{escape(title)}</h3>{remark}{content}</div>'


def cards(*items: str) -> str:
    """Cards side by side where there is room."""
    return '<div class="cards">' + "".join(items) + "</div>"


def table(head: Sequence[str], rows: Sequence[str], num_text: int = 1) -> str:
    """A table that scrolls inside its own box; ``rows`` are finished ``<tr>`` elements."""
    cells = "".join(f"<th{' class=text' if i < num_text else ''}>{escape(name)}</th>" for i, name in enumerate(head))
    return f'<div class="box"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def missing(text: str) -> str:
    """A note in place of what the inputs do not have."""
    return f'<p class="missing">{escape(text)}</p>'
