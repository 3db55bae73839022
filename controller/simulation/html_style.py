"""How the report looks: one style sheet, light, dark and printed.

Owns colours and layout. Must not know what is in the page.
"""

from __future__ import annotations

from typing import Final

from controller.simulation.svg_marks import NUM_COLOURS

# Told apart with any of the common colour vision deficiencies (CIELAB distances of 30 and more
# among the first four, 20 among all eight), and at 3:1 or more against their background.
LIGHT: Final = (
    "#3438aa", "#d9730a", "#0a9f73", "#9976b2", "#763f00", "#322858", "#7c7ee0", "#8c0830",
)  # fmt: skip
DARK: Final = (
    "#8a8df5", "#e5883d", "#22dba0", "#d59ed6", "#c6dc3a", "#f2e6f5", "#0c9596", "#d9515f",
)  # fmt: skip
BACKGROUNDS: Final = ("#ffffff", "#16181c")
TEXTS: Final = ("#1c1e21", "#e4e6ea")
QUIET_TEXTS: Final = ("#565b63", "#a9afb9")

_RULES: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.45rem; line-height: 1.25; overflow-wrap: anywhere; margin-bottom: 0.3rem; }
h2 { font-size: 1.15rem; margin: 0 0 0.2rem; }
section { margin-top: 2.4rem; border-top: 1px solid var(--grid); padding-top: 1rem; }
p { max-width: 48rem; margin: 0.3rem 0 0.6rem; } p.about { max-width: none; }
.quiet, caption, .nothing { color: var(--quiet); }
a { color: inherit; } :focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; padding: 0; }
.charts { display: grid; gap: 1.2rem 1rem; margin-bottom: 1.2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; break-inside: avoid; } figcaption { font-weight: 600; }
figure svg { width: 100%; height: auto; display: block; }
svg text { font: 13px system-ui, sans-serif; fill: var(--fg); }
.start { text-anchor: start; } .middle { text-anchor: middle; } .end { text-anchor: end; }
svg .note { paint-order: stroke; stroke: var(--bg); stroke-width: 3px; stroke-linejoin: round; }
svg .strong { font-weight: 700; }
.grid { stroke: var(--grid); stroke-width: 1; } .leader { stroke: var(--quiet); stroke-width: 1; }
.level { stroke: var(--fg); stroke-width: 1.2; stroke-dasharray: 5 4; }
.chain { fill: none; stroke: var(--quiet); stroke-width: 1; }
.crossing { fill: none; stroke: var(--fg); stroke-width: 1.5; }
.line { fill: none; } .band { stroke: none; opacity: 0.16; } .other { fill: var(--quiet); }
.hollow { fill: var(--bg); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.wide { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { text-align: left; white-space: nowrap; padding: 0 0 0.3rem; }
th, td { padding: 0.2rem 0.45rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; } thead th { border-bottom: 1px solid var(--fg); vertical-align: bottom; }
thead tr:not(:last-child) th { border-bottom: 1px solid var(--grid); text-align: center; }
tbody tr > * { border-bottom: 1px solid var(--grid); }
tbody tr.first > * { border-top: 2px solid var(--quiet); }
tbody th, thead th.first { text-align: left; position: sticky; left: 0; background: var(--bg); }
tbody th { font-weight: 400; } table.words td { text-align: left; white-space: normal; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; padding: 0;
  margin: 0.4rem 0 0.8rem; }
.key { width: 34px; height: 14px; margin-right: 0.4em; vertical-align: -0.15em; }
summary { cursor: pointer; padding: 0.3rem 0; }
pre { overflow-x: auto; font-size: 12px; }
@media print {
  body { max-width: none; margin: 0; font-size: 10pt; } nav { display: none; }
  .charts { grid-template-columns: repeat(2, 1fr); } .wide { overflow: visible; }
  table { font-size: 7pt; } th, td { padding: 0.1rem 0.25rem; }
  thead { display: table-row-group; }
  tr { break-inside: avoid; } h2, h3, .legend { break-after: avoid; }
  svg { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def style_sheet() -> str:
    """Return the whole style sheet."""
    light, dark = (_variables(mode) for mode in (0, 1))
    groups = "".join(
        f"polyline.c{i}, line.c{i}, .hollow.c{i} {{ stroke: var(--c{i}); }}"
        f" .band.c{i}, .dot.c{i}:not(.hollow) {{ fill: var(--c{i}); }}\n"
        for i in range(NUM_COLOURS)
    )
    # What is printed is light: paper is.
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"{_RULES}{groups}"
    )


def _variables(mode: int) -> str:
    colours = (LIGHT, DARK)[mode]
    named = {f"c{i}": colour for i, colour in enumerate(colours)} | {
        "bg": BACKGROUNDS[mode],
        "fg": TEXTS[mode],
        "quiet": QUIET_TEXTS[mode],
        "grid": ("#d8dade", "#3a3d44")[mode],
    }
    return " ".join(f"--{name}: {value};" for name, value in named.items())
