"""audit.html: the audit as one page that needs nothing else. What it shows of the web is escaped, and shows
as it is stored: marks that turn the writing direction are left out."""

import json
from html import escape

from engine.files import printable
from prepare.audit import other_thresholds
from prepare.filters import TABLE

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:66rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .6rem .2rem 0;vertical-align:top}
th{font-weight:600;color:#555}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
tr+tr td{border-top:1px solid #eee}.bar{display:flex;height:1rem;background:#f3f3f3}
.kept{background:#4a90c2}.gone{background:#e3a08f}
details{margin:.2rem 0}summary{cursor:pointer}
.sample{color:#444;font-size:.9rem;margin:.2rem 0 .2rem 1rem;overflow-wrap:anywhere}
.url{color:#777}svg{display:block;width:100%;height:120px}svg .in{fill:#4a90c2}svg .out{fill:#e3a08f}
.note{color:#666;font-size:.9rem}input[type=range]{width:100%}.two{display:grid;grid-template-columns:1fr 1fr;gap:2rem}
"""

SCRIPT = """
for (const box of document.querySelectorAll('[data-other]')) {
  const other = JSON.parse(box.dataset.other), range = box.querySelector('input'), told = box.querySelector('output');
  range.oninput = () => {
    const [value, more] = other[range.value];
    told.textContent = `at ${value}: ${more >= 0 ? '+' : ''}${more.toLocaleString()} pages pass`;
  };
  range.oninput();
}
"""


def page_of(audit):
    """The HTML text."""
    first, *_, last = audit["filters"].values()
    read, kept = first["documents_in"], last["documents_out"]
    size = sum(item["bytes"].get("bytes_file", 0) for item in audit["inputs"])
    parts = [
        f"<h1>{kept:,} documents of {read:,} pages</h1>",
        f"<p>{last['bytes_out']:,} bytes of text from {size:,} bytes in {len(audit['inputs']):,} files.</p>",
        "<h2>What became of them</h2>", _waterfall(audit),
        "<h2>Why</h2><p class=note>The samples of a reason are always the same: those whose URLs have the smallest "
        "hashes.</p>", _reasons(audit),
        "<h2>Scores</h2><p class=note>Blue passes, red does not. Move a threshold to see how many pages more or fewer "
        "would pass it; what comes after it may still drop them.</p>",
        *(_histogram(name, told) for name, told in audit["histograms"].items()),
        "<div class=two><div><h2>Languages</h2>", _counts("pages", audit["languages"]), "</div><div><h2>Domains</h2>",
        _counts("documents kept", audit["domains"]), "</div></div>",
        "<h2>What was mended in pages that stayed</h2>",
        _counts("pages", {name: note["documents"] for name, note in audit["notes"].items()}),
        "<h2>Files read</h2>", _inputs(audit)]
    return printable(
        f"<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8><title>Audit: {kept:,} of {read:,}</title>"
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script></body></html>\n")


def _waterfall(audit):
    most = max(1, next(iter(audit["filters"].values()))["documents_in"])
    sources = {name: f"{', '.join(keys)}: {source}" if keys else source for name, _, keys, source in TABLE}
    rows = []
    for name, stage in audit["filters"].items():
        gone = stage["documents_in"] - stage["documents_out"]
        bar = "".join(f"<div class={kind} style='width:{100 * count / most:.2f}%'></div>"
                      for kind, count in (("kept", stage["documents_out"]), ("gone", gone)))
        rows.append(f"<tr title='{escape(sources.get(name, ''), quote=True)}'><td>{escape(name)}<td class=n>"
                    f"{stage['documents_out']:,}<td class=n>{f'{gone:,}' if gone else ''}<td style='width:55%'>"
                    f"<div class=bar>{bar}</div>")
    return "<table><tr><th>filter<th class=n>left<th class=n>dropped<th>" + "".join(rows) + "</table>"


def _reasons(audit):
    rows = [(counts["documents"], name, reason, counts) for name, stage in audit["filters"].items()
            for reason, counts in stage["reasons"].items()]
    parts = []
    for documents, name, reason, counts in sorted(rows, key=lambda row: (-row[0], row[2])):
        hosts = ", ".join(f"{escape(host)} {count:,}" for host, count in list(counts["hosts"].items())[:5])
        samples = "".join(f"<div class=sample><span class=url>{escape(example['url'])}</span> "
                          f"{escape(example['detail'])}<br>{escape(example['start'])}</div>"
                          for example in counts["examples"])
        parts.append(f"<details><summary><b>{escape(reason)}</b> {documents:,} pages, {counts['bytes']:,} bytes, by "
                     f"<i>{escape(name)}</i></summary><div class=sample>{hosts}</div>{samples}</details>")
    return "".join(parts) or "<p>Nothing was dropped.</p>"


def _histogram(name, told):
    """Bars of equal width, one a bin, and for each threshold a line and a slider."""
    edges, counts, limits = told["edges"], told["counts"], told["threshold"]
    most, width = max(counts), 1000 / len(counts)
    inside = lambda edge: all(edge < limit if key.startswith("max") else edge >= limit for key, limit in limits.items())
    bars = "".join(f"<rect class={'in' if inside(edge) else 'out'} x={number * width:.1f} width={width * .9:.1f} "
                   f"y={110 - 100 * count / most:.1f} height={100 * count / most:.1f}><title>from {edge:g}: {count:,}"
                   "</title></rect>"
                   for number, (edge, count) in enumerate(zip(edges, counts)))
    lines = "".join(f"<line x1={edges.index(limit) * width:.1f} x2={edges.index(limit) * width:.1f} y1=0 y2=115 "
                    "stroke=#b33 stroke-width=2 />" for limit in limits.values())
    sliders = "".join(
        f"<div data-other='{escape(json.dumps(other), quote=True)}'>{escape(key)} = {limits[key]:g}; <output></output>"
        f"<input type=range min=0 max={len(other) - 1} value={edges.index(limits[key])}></div>"
        for key, other in other_thresholds(told))
    return (f"<h3>{escape(name)}</h3><svg viewBox='0 0 1000 120' preserveAspectRatio=none>{bars}{lines}</svg>"
            f"<div class=note>from {edges[0]:g} to {edges[-1]:g} and above</div>{sliders}")


def _counts(what, counts):
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:25]
    return f"<table><tr><th><th class=n>{what}" + "".join(
        f"<tr><td>{escape(name)}<td class=n>{count:,}" for name, count in rows) + "</table>"


def _inputs(audit):
    rows = []
    for item in audit["inputs"]:
        lost = ", ".join(f"{name} {count:,}" for name, count in item["losses"].items())
        left_out = "".join(f"<br>left out, since it killed its process: {escape(page)}" for page in item["quarantined"])
        rows.append(f"<tr><td>{escape(item['file'])}<td class=n>{item['bytes'].get('bytes_file', 0):,}<td class=n>"
                    f"{item['documents']:,}<td>{'' if item['whole'] else 'not whole: '}{escape(lost)}{left_out}")
    return ("<table><tr><th>file<th class=n>bytes<th class=n>documents that passed<th>what else was in it"
            + "".join(rows) + "</table>")
