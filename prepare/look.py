"""To look at what has been made: why a page was dropped or kept, and what is in a folder of token shards."""

from collections import Counter
from pathlib import Path

import numpy as np

from configurator import refuse
from engine.files import fits, printable, publish, read_json
from engine.shards import INDEX, SPLIT, TokenData, read_documents, read_jsonl_zst
from engine.tokenizer import Tokenizer, find_tokenizer
from prepare.audit import FORM
from prepare.filters import TABLE, steps_of
from prepare.warc import read_pages, shown_name, size_of

NO_TEXT = ("readable", "protocol", "blocked", "decoded")      # filters that need none yet
SHOWN = 3                                                       # documents that inspect decodes


def remember(work, decided):
    """Write down what deduplication decided about each document, for `explain`."""
    _, kept, why, _ = decided
    told = [why.get(number, ("", "", -1)) for number in range(len(kept))]
    with open(work / "decisions.tmp", "wb") as file:
        np.savez(file, reason=[reason for reason, _, _ in told], detail=[detail for _, detail, _ in told],
                 representative=[original for _, _, original in told])
        publish(file, work / "decisions.npz")


def explain(config, paths, settings):
    """Print what each filter says of the pages with the URL or id config.explain, also those behind the one that drops
    it, and what became of it afterwards."""
    found = 0
    if config.corpus:
        paths = {Path(config.data_dir) / "input" / "pydoc.warc.gz": 0} | paths
    for path in paths:
        for page in read_pages(path, Counter(), settings["max_decompressed"]):
            if config.explain in (page["url"], page["id"]):
                found += 1
                print(printable(f"{page['url'] or page['id']} in {shown_name(path)}, {size_of(page):,} bytes"))
                if explain_page(page, settings):
                    explain_later(config, page)
    if not found:
        names = ", ".join(map(shown_name, [*paths][:5])) + ", ..." * (len(paths) > 5)
        refuse(f"no page has the URL or id {config.explain!r} in the {len(paths)} input files ({names}). A page "
               "without a URL has an id: its own, or FILE:LINE in JSON lines, FILE in a text file")


def explain_page(page, settings):
    """Whether all filters let it pass."""
    keys = {name: [key for key in keys if key.startswith(("min_", "max_", "language_"))] for name, _, keys, _ in TABLE}
    page["measures"], dropped = {}, None
    page.setdefault("notes", [])
    for name, step in steps_of(settings):
        if dropped and name not in NO_TEXT and not page.get("text"):
            print(f"    {name:<20} has no text to judge")
            continue
        before = dict(page["measures"])
        reason = step(page, settings)
        told = [f"{key} {value:.6g}" for key, value in page["measures"].items() if key not in before]
        told += [f"({key} {settings[key]})" for key in keys[name] if told]
        if name == "language":
            told.insert(0, page["language"])
        print(f"    {name:<20} {reason or 'passes':<22} {' '.join(told)}".rstrip())
        dropped = dropped or reason
    print(f"  dropped: {dropped}" if dropped else f"  passes all filters with {len(page['text']):,} characters",
          f"({', '.join(page['notes'])})" if page["notes"] else "")
    if page.get("text"):
        print(f"  it begins: {printable(page['text'][:300])!r}")
    return not dropped


def explain_later(config, page):
    """What deduplication and the split made of it, if they have been."""
    root = Path(config.data_dir)
    audit = read_json(root / "audit.json", {})
    parts = [root / "work" / f"{item['part']}.jsonl.zst" for item in audit["inputs"]] if fits(audit, FORM) else []
    if not parts or not all(path.exists() for path in [*parts, root / "work" / "decisions.npz"]):
        print(f"  {root} has not been finished: nothing is known of what comes after the filters")
        return
    urls = [(document["url"], document["id"]) for path in parts for document in read_jsonl_zst(path)]
    path = root / "work" / "decisions.npz"
    try:
        with np.load(path) as file:
            told = dict(file)
    except Exception as error:                                # a damaged zip file is told of in many ways
        refuse(f"{path} is damaged: {error}. Delete {root / 'audit.json'}, then run the same without --explain")
    for number in (number for number, names in enumerate(urls) if names == (page["url"], page["id"])):
        reason, original = str(told["reason"][number]), int(told["representative"][number])
        like = f" of {printable(urls[original][0] or urls[original][1])}" if original >= 0 else ""
        detail = f", {told['detail'][number]}" if told["detail"][number] else ""
        print(f"  afterwards dropped: {reason}{like}{detail}" if reason else "  kept")
    for split in ("train", "val"):
        names = ((document["url"], document["id"]) for document in read_documents(root, split))
        if (page["url"], page["id"]) in names:
            print(f"  in the split {split}")


def inspect(folder):
    """Print the index of token shards, counts, and the first documents decoded."""
    tokens = folder if (folder / "index.json").exists() else folder / "tokens"
    if not (tokens / "index.json").exists():
        refuse(f"there are no token shards in {folder} (no index.json in it or in its folder tokens)")
    index = read_json(tokens / "index.json", like=INDEX)
    if not fits([*index["splits"].values()], [SPLIT]):
        refuse(f"{tokens}/index.json is damaged: its splits have another form; prepare_data.py writes it anew")
    for name, value in index.items():
        if name != "splits":
            print(f"{name:<16}{value}")
    made_with = tokens.parent / "tokenizer"
    tokenizer = Tokenizer.load(made_with) if find_tokenizer(made_with) else None
    if tokenizer and tokenizer.hash != index["tokenizer_hash"]:
        print(f"the tokenizer in {made_with} is another one ({tokenizer.hash}): ids are shown as they are")
        tokenizer = None
    for split, entry in index["splits"].items():
        print(f"\n{split}: {entry['n_docs']:,} documents, {entry['n_tokens']:,} tokens, "
              f"{entry.get('text_bytes', 0):,} bytes of text")
        for file in entry["files"]:
            print(f"    {file['name']}  {file['tokens']:,} tokens  {file['sha256']}")
        if not entry["n_docs"]:
            continue
        data = TokenData(tokens, split)
        lengths = np.diff(data.offsets.astype(np.int64))
        print(f"    tokens a document: {lengths.min():,} at least, {int(np.median(lengths)):,} in the middle, "
              f"{lengths.max():,} at most")
        for number in range(min(SHOWN, data.n_docs)):
            ids = data.read(int(data.offsets[number]), min(int(lengths[number]), 200)).tolist()
            text = printable(tokenizer.decode(ids, skip_special=False)) if tokenizer else ids
            print(f"    {number}: {ids[:8]} ... {text!r}"[:500])
