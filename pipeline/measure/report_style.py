"""The style sheet of the page of `make report`: light or dark as the reader's system is."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --soft: #5a6577; --line: #dfe3ea; --fill: #eef1f5;
  --train: #2f6fde; --test: #d9822b; --none: #9aa4b2;
  --ok: #1a7f4b; --warning: #9a5b00; --error: #b3261e;
  --ok-back: #e7f5ed; --warning-back: #fdf2df; --error-back: #fcebea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161d; --card: #1a202a; --ink: #e6eaf1; --soft: #9ba7b8; --line: #2c3542; --fill: #232b37;
    --train: #6ea0ff; --test: #f0a355; --none: #667183;
    --ok: #5fd39a; --warning: #f2bd62; --error: #ff8f87;
    --ok-back: #15291f; --warning-back: #2e2512; --error-back: #331c1b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  overflow-wrap: anywhere;
}
main { max-width: 76rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 .35rem; }
h3 { font-size: 1rem; line-height: 1.35; margin: 0 0 .5rem; }
p { margin: 0 0 .75rem; }
code {
  font: .875em/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  background: var(--fill); border-radius: .3rem; padding: .1em .35em;
}
.soft { color: var(--soft); }
.small { font-size: .875rem; }
section { margin-top: 2.75rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem 1.1rem; }
.card > :last-child { margin-bottom: 0; }
nav { margin-top: 1rem; display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
a { color: var(--train); text-underline-offset: .2em; }

.verdict { margin-top: 1.25rem; border-left: .35rem solid var(--tone); background: var(--tone-back); }
.verdict h2 { color: var(--tone); }
.ok { --tone: var(--ok); --tone-back: var(--ok-back); }
.warning { --tone: var(--warning); --tone-back: var(--warning-back); }
.error { --tone: var(--error); --tone-back: var(--error-back); }
.tag {
  display: inline-block; color: var(--tone); background: var(--tone-back); border-radius: .3rem;
  padding: .05rem .5rem; font-size: .8125rem; font-weight: 600; white-space: nowrap;
}

.facts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(8.25rem, 1fr)); gap: .75rem;
  margin: 1.25rem 0 0;
}
.facts div { padding: .7rem .9rem; }
.facts div, .scroll, .checks {
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
}
.facts dt { color: var(--soft); font-size: .8125rem; }
.facts dd { margin: 0; font-size: 1.1rem; font-weight: 600; line-height: 1.4; white-space: nowrap; }
.facts dd, table, .times, svg text, .rows { font-variant-numeric: tabular-nums; }

.checks { list-style: none; margin: 0; padding: 0; }
.checks li {
  display: grid; grid-template-columns: 6.5rem 5.5rem 1fr; gap: .1rem .75rem; align-items: baseline;
  padding: .6rem 1rem; border-top: 1px solid var(--line);
}
.checks li:first-child { border-top: 0; }
.checks .do { grid-column: 3; }
@media (max-width: 40rem) {
  .checks li { grid-template-columns: 1fr auto; }
  .checks .found, .checks .do { grid-column: 1 / -1; }
}

.scroll { overflow: auto; max-height: 34rem; }
.scroll:focus-visible { outline: 2px solid var(--train); outline-offset: 2px; }
.scroll + * { margin-top: .75rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .45rem .8rem; border-top: 1px solid var(--line); }
thead th {
  position: sticky; top: 0; z-index: 1; border-top: 0; background: var(--fill);
  color: var(--soft); font-weight: 600; font-size: .8125rem; white-space: nowrap;
}
tbody th { font-weight: 500; }
.number { text-align: right; white-space: nowrap; }
.text, .wide { min-width: 12rem; overflow-wrap: anywhere; }
.wide { min-width: 17rem; }

.bar {
  display: flex; min-width: 7rem; height: .7rem; margin-top: .4rem; background: var(--fill);
  border-radius: .2rem; overflow: hidden;
}
.bar span { height: 100%; }
.train { background: var(--train); } .test { background: var(--test); } .none { background: var(--none); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; }
.legend i { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin-right: .4rem; }

.charts, .cards, .strips { display: grid; gap: 1rem; }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.cards { gap: 1.5rem 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.strips { gap: 1.25rem 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg rect { fill: var(--train); }
.rows { display: grid; grid-template-columns: auto 1fr auto; gap: .3rem .75rem; font-size: .9rem; }
.rows .bar { margin-top: .45rem; min-width: 2rem; }

figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; border-radius: .35rem; background: #000; }
figcaption { font-size: .875rem; margin-top: .4rem; }
.times {
  display: grid; grid-auto-flow: column; grid-auto-columns: 1fr; margin: .2rem 0 0; padding: 0;
  list-style: none; color: var(--soft); font-size: .75rem; text-align: center;
}
.part { margin-top: 1.5rem; }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
@media print { .scroll { max-height: none; } }
"""
