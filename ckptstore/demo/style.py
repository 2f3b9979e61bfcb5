"""The style sheet of the demo's page: one palette for light, one for dark."""

from __future__ import annotations

STYLE = """
:root {
  --page: #f7f7f5; --card: #ffffff; --ink: #1b1f27; --muted: #5d6572; --line: #e3e4e0; --grid: #ecece8;
  --run: #2457d6; --other: #c9d3e6; --resized: #00857a; --band: rgba(208, 72, 48, .13); --faint: #b9bec8;
  --trainer: #c8371f; --rollout: #b7791f; --coordinator: #7a3fc4;
  --written: #2f6fb2; --reused: #a9cbe8;
  --phase0: #8a94a6; --phase1: #2f6fb2; --phase2: #7a3fc4; --phase3: #00857a; --phase4: #d08a1d;
  --good: #0a7a4b; --good-tint: #e7f4ec; --bad: #b3261e; --bad-tint: #fbeae8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121417; --card: #1a1d22; --ink: #e8eaed; --muted: #9aa3b0; --line: #2c3038; --grid: #262a31;
    --run: #7aa2ff; --other: #3d4a66; --resized: #35c4b5; --band: rgba(255, 120, 92, .17); --faint: #565d69;
    --trainer: #ff7a62; --rollout: #e9b04f; --coordinator: #b48bf2;
    --written: #5b9be0; --reused: #2b4c6e;
    --phase0: #97a1b3; --phase1: #5b9be0; --phase2: #b48bf2; --phase3: #35c4b5; --phase4: #e9b04f;
    --good: #58d29a; --good-tint: #15281f; --bad: #ff8a80; --bad-tint: #301a19;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); font-variant-numeric: tabular-nums;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1136px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: clamp(22px, 3.4vw, 32px); line-height: 1.2; margin: 4px 0 8px; letter-spacing: -.01em; }
h2 { font-size: 16px; margin: 0; }
p { margin: 0; }
header { background: var(--card); border: 1px solid var(--line); border-left: 6px solid; border-radius: 10px;
  padding: 20px 24px; }
header.good { border-left-color: var(--good); background: var(--good-tint); }
header.bad { border-left-color: var(--bad); background: var(--bad-tint); }
header h2 { margin-top: 14px; }
header ul { margin: 4px 0 0; padding-left: 20px; }
.eyebrow { color: var(--muted); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); gap: 12px; margin: 12px 0; }
.tile, figure, .tables section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; display: flex; flex-direction: column; }
.tile b { font-size: 20px; line-height: 1.3; white-space: nowrap; }
.tile span { font-size: 13px; }
.tile small, figcaption p, footer { color: var(--muted); font-size: 13px; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
figure { margin: 0; padding: 16px; min-width: 0; }
figure.across, section.across { grid-column: 1 / -1; }
figcaption { margin-bottom: 10px; }
.phone { display: none; }
svg { display: block; width: 100%; height: auto; font-size: 12px; font-variant-numeric: tabular-nums; }
svg text { fill: var(--muted); }
svg text.name { fill: var(--muted); font-style: italic; }
svg text.note { fill: var(--resized); }
.line { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--faint); }
.median { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 4 3; }
.resize { stroke: var(--resized); stroke-dasharray: 3 3; }
.drop { stroke-dasharray: 1 3; }
.drop.trainer { stroke: var(--trainer); }
.drop.rollout { stroke: var(--rollout); }
.drop.coordinator { stroke: var(--coordinator); }
.hover { fill: transparent; }
.hover:hover { fill: var(--ink); fill-opacity: .07; }
.tables { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; margin-top: 12px; align-items: start; }
.tables section { padding: 16px; min-width: 0; }
.scroll { overflow-x: auto; max-height: 640px; margin-top: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); }
thead th, td:first-child { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--muted); font-weight: 500; position: sticky; top: 0; background: var(--card); }
tbody th { font-weight: 500; }
footer { margin-top: 20px; }
code { font: 12px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
@media (max-width: 1000px) {
  .tiles { grid-template-columns: repeat(3, 1fr); }
  .tables { grid-template-columns: 1fr; }
}
@media (max-width: 820px) {
  .figures { grid-template-columns: 1fr; }
  .desk { display: none; }
  .phone { display: block; }
  .phone svg { margin: 0 auto; max-width: 560px !important; }
}
@media (max-width: 520px) {
  main { padding: 10px 8px 32px; }
  header { padding: 14px 16px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tile b { font-size: 17px; }
  figure, .tables section { padding: 12px 8px; }
}
@media print { figure, section { break-inside: avoid; } }
"""
