"""What prepare_data.py can do beside the usual: windows, other splits, comparing with other texts, and looking at results."""

import gzip
import json
import random
import re
import types

import numpy as np
import pytest
import zstandard

import prepare_data
from archives import PROSE, html, members, prose, response
from configurator import configure
from engine.shards import TokenData, read_documents
from prepare import audit, filters, perplexity
from prepare.filters import TABLE, blocked, contaminated, masked, steps_of, strings_of
from prepare.page import page_of
from prepare.rules import RULES, c4, fineweb, gopher_quality
from prepare.stream import text_of
from prepare.text import changed_by_normalising, language_of, normalise
from prepare_data import windows_of
from small import byte_tokenizer
from test_filters import GERMAN, JAPANESE, SETTINGS, page
from test_prepare_data import NAMES, call, documents, many, refused, run, texts


def audit_of(folder):
    return json.loads((folder / "audit.json").read_text())


def lines(path, *items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


# --------------------------------------------------------------------------------------------------------------------
# Windows

def test_windows_cover_the_text_and_are_cut_at_white_space():
    draw = random.Random(0)
    for size, overlap in ((2048, 512), (100, 30), (50, 0), (7, 2), (2, 0)):
        for _ in range(60):
            text = "".join(draw.choices("abcdefgh \n", k=draw.randrange(6 * size)))
            windows = list(windows_of(text, size, overlap))
            assert all(0 < len(window) <= size for window in windows) or windows == [""] == [text]
            at = 0
            for before, window in zip(windows, windows[1:]):
                end = at + len(before)
                at = next(start for start in range(end - overlap, end + 1) if text.startswith(window, start))
            assert text.endswith(windows[-1]) and (overlap or "".join(windows) == text)
    text = prose("alder") * 5
    assert all(window[-1] == " " for window in list(windows_of(text, 300, 60))[:-1])
    assert all(text[text.index(window) - 1] == " " for window in list(windows_of(text, 300, 60))[1:])
    assert list(windows_of(text, 0, 512)) == [text]
    assert len(list(windows_of("x" * 10_000, 2048, 512))) == 1 + -(-(10_000 - 2048) // 1536)


def test_windows_have_bos_on_the_first_and_eos_on_the_last_and_stay_on_one_side(tmp_path, capsys):
    items = [{"text": " ".join(prose(name + letter) for letter in "abcde"), "url": f"http://a.example/{name}"} for name in NAMES]
    lines(tmp_path / "a.jsonl", *items)
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path / "d" / "tokenizer")
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0.3", "--window_chars=2048", "--window_overlap=512")
    share = float(re.search(r"([\d.]+)% of the text is there twice", capsys.readouterr().out)[1])
    assert 25 < share < 34
    total = 0
    for split in ("train", "val"):
        data = TokenData(tmp_path / "d" / "tokens", split)
        for number, document in enumerate(read_documents(tmp_path / "d", split)):
            begin, end = map(int, data.offsets[number:number + 2])
            ids = data.read(begin, end - begin).tolist()
            windows = list(windows_of(document["text"], 2048, 512))
            assert len(windows) > 4 and ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
            assert tokenizer.decode_bytes(ids[1:-1], skip_special=False) == "".join(windows).encode()
            total += 1
        assert data.index["splits"][split]["text_bytes"] == data.n_tokens - 2 * data.n_docs
    assert total == 12
    refused(capsys, "window_overlap must be below half", arguments=[f"--data_dir={tmp_path / 'd'}", "--corpus=pydoc",
                                                                    "--window_chars=100", "--window_overlap=50"])


# --------------------------------------------------------------------------------------------------------------------
# The split by domain, the scope of deduplication, nothing left

def test_the_split_by_domain_keeps_a_host_on_one_side_whatever_comes(tmp_path):
    hosts = [f"{name}.example" for name in NAMES]
    def pages(count, name):
        return [{"text": prose(f"{name}{n}".translate(str.maketrans("0123456789", "qwertzuiop"))),
                 "url": f"http{'s' * (n % 2)}://{'www.' * (n % 3 == 0)}{hosts[n % 12].upper() if n % 5 == 0 else hosts[n % 12]}/{n}"}
                for n in range(count)]
    lines(tmp_path / "a.jsonl", *pages(60, "x"))
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0.3", "--val_by=domain", "--language_threshold=0", "--languages=()")
    side = lambda: {re.sub(r"https?://(www\.)?|/.*", "", document["url"]).lower(): document["split"]
                    for document in documents(tmp_path / "d")}
    before = side()
    assert len(before) == 12 and set(before.values()) == {"train", "val"}
    for document in documents(tmp_path / "d"):
        assert document["split"] == before[re.sub(r"https?://(www\.)?|/.*", "", document["url"]).lower()]
    lines(tmp_path / "b.jsonl", *pages(90, "y"))
    run(tmp_path / "d", tmp_path / "*.jsonl", "--val_fraction=0.3", "--val_by=domain", "--language_threshold=0", "--languages=()")
    assert side() == before and len(documents(tmp_path / "d")) == 150


def test_duplicates_within_each_pattern_of_inputs_or_over_all(tmp_path):
    for crawl in ("a", "b"):
        (tmp_path / crawl).mkdir()
        foot = "This paragraph stands at the foot of every page of every crawl there is."
        lines(tmp_path / crawl / "x.jsonl", *({"text": f"{prose(name)}\n\nToo short.\n\n{foot}",
                                               "url": f"http://{crawl}.example/{number}"}
                                              for number, name in enumerate((*NAMES[:3], NAMES[0]))))
    options = ("--paragraph_min_chars=40", f"--inputs={tmp_path}/a,{tmp_path}/b")
    run(tmp_path / "d", "none", *options)
    assert sorted(texts(tmp_path / "d")) == [f"http://a.example/{n}" for n in range(3)]
    run(tmp_path / "d", "none", *options, "--dedup_scope=input")
    found = texts(tmp_path / "d")
    assert sorted(found) == [f"http://{crawl}.example/{n}" for crawl in "ab" for n in range(3)]
    assert sum("at the foot" in text for text in found.values()) == 2
    assert sum("Too short." in text for text in found.values()) == 6
    assert {name: stage["documents_in"] - stage["documents_out"] for name, stage in audit_of(tmp_path / "d")["filters"].items()
            if name.endswith("duplicate")} == {"exact_duplicate": 2, "near_duplicate": 0}


def test_when_nothing_is_left_no_older_shards_are_left_either(tmp_path, capsys):
    lines(tmp_path / "a.jsonl", *({"text": prose(name)} for name in NAMES[:3]))
    byte_tokenizer().save(tmp_path / "d" / "tokenizer")
    run(tmp_path / "d", tmp_path / "a.jsonl")
    assert TokenData(tmp_path / "d" / "tokens", "train").n_docs
    with pytest.raises(SystemExit):
        run(tmp_path / "d", tmp_path / "a.jsonl", "--min_chars=90000")
    with pytest.raises(SystemExit):
        TokenData(tmp_path / "d" / "tokens", "train")
    assert "no index.json" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Filters that are off by default

def test_the_table_names_every_filter_and_its_source_and_runs_what_is_set():
    assert [name for name, *_ in TABLE].index("normalised") < [name for name, *_ in TABLE].index("language")
    assert all(source and all(key in SETTINGS for key in keys) for _, _, keys, source in TABLE)
    always = ["readable", "protocol", "decoded", "extracted", "normalised", "length", "language", "entropy", "ascii_share"]
    assert [name for name, _ in steps_of(SETTINGS)] == always
    everything = {**SETTINGS, "rules": ("c4", "gopher_quality"), "block_list": "x", "mask_personal": True,
                  "contaminated": ("x",), "perplexity_text": "x"}
    assert [name for name, _ in steps_of(everything)] == [
        "readable", "protocol", "blocked", *always[2:], "gopher_quality", "c4", "masked", "contaminated", "perplexity"]


def test_variants_of_rules_differ_where_they_say():
    long_words = " ".join(["the", "of"] * 40 + ["incomprehensibilities" * 2] * 40)          # mean 15.3, median 3
    assert gopher_quality(page(text=long_words), {}) == "gopher_word_length"
    assert RULES["gopher_quality_dolma"](page(text=long_words), {}) is None
    stars = "\n".join(f"* the {word} of them all" for word in prose("alder").split())
    assert gopher_quality(page(text=stars), {}) != "gopher_bullets" == RULES["gopher_quality_dolma"](page(text=stars), {})
    four = "This is one sentence.\nTiny it is.\n" + "And here we have another one.\n" * 3
    assert c4(page(text=four), {}) is None and RULES["c4_datatrove"](page(text=four), {}) is None
    assert RULES["c4_datatrove"](page(text="Here are four words.\n" * 4), {}) == "c4_sentences"
    assert c4(page(text="Here are four words.\n" * 4), {}) == "c4_sentences"
    assert RULES["c4_datatrove"](page(text="Here are four words.\n" * 5), {}) is None
    endless = "It is a line of words. It is one. And it has no end at all\n" * 3
    assert c4(page(text=endless), {}) == "c4_sentences" and RULES["c4_lines_without_end"](page(text=endless), {}) is None
    twice = "\n".join([f"{word}{n} is a line of more than thirty letters." for n, word in enumerate(prose("a").split()[:40])]
                      + ["The same line stands here for a second time."] * 2)
    assert fineweb(page(text=twice), {}) is None
    assert RULES["fineweb_code"](page(text=twice), {}) == "fineweb_repeated_lines"


def test_blocked_domains_and_folders(tmp_path):
    path = tmp_path / "blocked.txt"
    path.write_text("# a comment\nbad.example\nhttps://www.ugly.example/ads/\n\nGood.Example/Private # not this\n")
    settings = {"block_list": str(path)}
    for url, reason in (("http://bad.example/x", "blocked"), ("https://very.BAD.example", "blocked"),
                        ("http://notbad.example/", None), ("http://bad.example.com/", None), ("", None),
                        ("http://ugly.example/ads/1?x=2", "blocked"), ("http://www.ugly.example/ads", "blocked"),
                        ("http://ugly.example/adsense", None), ("http://ugly.example/", None),
                        ("http://good.example/private/1", "blocked"), ("http://good.example/", None)):
        assert blocked(page(url=url), settings) == reason, url


def test_addresses_of_people_and_machines_are_masked():
    text = ("Write to Jane.Doe+spam@mail.example.co.uk or x@y.org, at 93.184.216.34 or 8.8.8.8:53. Not 10.0.0.1, 127.0.0.1, "
            "1.2.3, 1.2.3.4.5, 999.1.1.1, v1.2.3.4, @name or a@b.")
    item = page(text=text)
    assert masked(item, {}) is None and item["notes"] == ["masked_addresses"]
    assert item["text"] == ("Write to name@example.com or name@example.com, at 192.0.2.1 or 192.0.2.1:53. Not 10.0.0.1, "
                            "127.0.0.1, 1.2.3, 1.2.3.4.5, 999.1.1.1, v1.2.3.4, @name or a@b.")
    item = page(text=PROSE)
    assert masked(item, {}) is None and item["text"] == PROSE and not item["notes"]


def test_pages_that_share_13_words_with_an_evaluation(tmp_path):
    thirteen = "one two three four five six seven eight nine ten eleven twelve thirteen".split()
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": " ".join(thirteen), "choices": [{"text": PROSE}]}) + "\n")
    (tmp_path / "eval.txt").write_text("A plain line that is long enough to have thirteen words in it, or even a few more.\n[1")
    settings = {"contaminated": (str(tmp_path / "eval.jsonl"), str(tmp_path / "eval.txt")), "contaminated_drop": True}
    for text, found in ((PROSE, True), ("x " + " ".join(thirteen).upper() + ", y", True), (" ".join(thirteen[:12]), False),
                        (" ".join(thirteen[:6] + ["and"] + thirteen[6:]), False), ("", False),
                        ("plain line that is long enough to have thirteen words in it, or even a", True)):
        item = page(text=text)
        assert (contaminated(item, settings) == "contaminated") is found and (item["notes"] == ["contaminated"]) is found, text
        assert contaminated(page(text=text), {**settings, "contaminated_drop": False}) is None
    (tmp_path / "none").write_text("short")
    assert contaminated(page(text=PROSE), {**settings, "contaminated": (str(tmp_path / "none"),)}) is None


@pytest.mark.parametrize("key", ["contaminated", "block_list", "perplexity_text"])
def test_files_to_compare_with_may_be_compressed_and_noise_is_refused(tmp_path, key, capsys):
    lines = "\n".join(f"https://www.blocked{n}.example one two three four five six seven eight nine ten eleven twelve"
                      for n in range(9))
    for name, pack in (("plain", bytes), ("gz", gzip.compress), ("zst", zstandard.compress)):
        (tmp_path / name).write_bytes(pack(lines.encode()))
    assert text_of(tmp_path / "plain") == text_of(tmp_path / "gz") == text_of(tmp_path / "zst") == lines
    (tmp_path / "a.jsonl").write_text("{}")
    arguments = [f"--data_dir={tmp_path / 'd'}", f"--inputs={tmp_path / 'a.jsonl'}"]
    for name in ("plain", "gz", "zst"):
        prepare_data.check(configure(vars(prepare_data), [*arguments, f"--{key}={tmp_path / name}"]))
    bad = {"empty": b"\n", "table": b"PAR1\0\0", "cut": gzip.compress(lines.encode())[:-9],
           "utf16": "text".encode("utf-16")}
    for name, data in bad.items() | ({"short": b"no\nthirteen\nwords"}.items() if key == "contaminated" else set()):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SystemExit) as stop:
            prepare_data.check(configure(vars(prepare_data), [*arguments, f"--{key}={tmp_path / name}"]))
        assert stop.value.code == 2 and f"--{key}: {tmp_path / name}" in capsys.readouterr().err


def test_the_same_file_under_another_key_is_another_setting(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": prose(name), "url": f"http://{name}.example/"}) + "\n"
                                              for name in ("alder", "birch", "cedar")))
    (tmp_path / "list").write_text(f"alder.example\n{prose('birch')[len(PROSE):]}\n")
    left = {}
    for key in ("block_list", "contaminated", "block_list"):
        call(f"--data_dir={tmp_path / 'd'}", f"--inputs={tmp_path / 'a.jsonl'}", f"--{key}={tmp_path / 'list'}")
        left[key] = {document["url"][7:12] for document in documents(tmp_path / "d")}
    assert left == {"block_list": {"birch", "cedar"}, "contaminated": {"alder", "cedar"}}


def test_clean_text_is_less_surprising_and_the_model_has_a_name(tmp_path):
    clean = " ".join(prose(name) for name in NAMES) * 3
    (tmp_path / "clean.txt").write_text(clean)
    model = perplexity.model_of(str(tmp_path / "clean.txt"))
    (tmp_path / "clean.jsonl").write_text(json.dumps({"text": clean}) + "\n{cut")
    assert model.hash == perplexity.model_of(str(tmp_path / "clean.jsonl")).hash != perplexity.Model(clean + "!").hash
    scores = [model.perplexity(text) for text in (PROSE.upper(), prose("oak"), GERMAN * 3, "zxq vbnm qrst wrtz " * 20, JAPANESE)]
    assert scores == sorted(scores) and scores[0] < 2 and scores[4] > 1000
    assert model.perplexity("") == model.alphabet
    # A true distribution: the probabilities of all that can follow a text sum to one.
    model, text = perplexity.Model("abracadabra" * 40), "abracad"
    bits = {end: np.log2(model.perplexity(text + end)) * len(text + end) for end in "abrcd#"}
    before = np.log2(model.perplexity(text)) * len(text)
    assert sum(2 ** (before - total) for total in bits.values()) == pytest.approx(1, abs=0.01)


def test_the_most_surprising_share_is_dropped_and_another_share_needs_no_cleaning(tmp_path, monkeypatch, capsys):
    (tmp_path / "clean.txt").write_text(" ".join(prose(name) for name in NAMES))
    items = [{"text": prose(name) + (" qxz vbj wkk zzp" * 40 if n % 4 == 0 else ""), "url": f"http://a.example/{n}"}
             for n, name in enumerate(NAMES)]
    lines(tmp_path / "a.jsonl", *items)
    options = (f"--perplexity_text={tmp_path / 'clean.txt'}", "--language_threshold=0", "--languages=()")
    run(tmp_path / "d", tmp_path / "a.jsonl", *options, "--perplexity_percentile=75")
    assert set(texts(tmp_path / "d")) == {f"http://a.example/{n}" for n in range(12) if n % 4}
    told = audit_of(tmp_path / "d")
    assert told["filters"]["surprising"]["reasons"]["surprising"]["documents"] == 3 and told["filters"]["perplexity"]
    assert told["perplexity_model"] == perplexity.model_of(str(tmp_path / "clean.txt")).hash and "perplexity" in told["histograms"]
    capsys.readouterr()
    run(tmp_path / "d", tmp_path / "a.jsonl", *options)
    assert "0 cleaned, 1 cleaned before" in capsys.readouterr().out and len(documents(tmp_path / "d")) == 12
    (tmp_path / "clean.txt").write_text("Something else. " * 99)                 # another content of the same name
    run(tmp_path / "d", tmp_path / "a.jsonl", *options)
    assert "1 cleaned, 0 cleaned before" in capsys.readouterr().out


def test_lines_of_a_clean_file_that_have_no_text_are_passed_over(tmp_path):
    good = [json.dumps({"text": prose(name)}) for name in NAMES]
    odd = ['{"text": 5}', '{"text": null}', "[1]", "5", '{"a": 1}', "[" * 100_000, '{"a":' * 5_000, '{"text": "cut']
    for name, rows in (("good", good), ("odd", [*good[:6], *odd, *good[6:], odd[-1]])):
        (tmp_path / name).write_text("\n".join(rows))
    assert perplexity.model_of(str(tmp_path / "odd")).hash == perplexity.model_of(str(tmp_path / "good")).hash
    deep = f"{'[' * 900}{json.dumps(prose('alder'))}{']' * 900}"        # some parsers go deeper than a walk does
    assert any("alder" in text for text in strings_of(deep)) and strings_of("[" * 100_000) == ["[" * 100_000]


def test_fasttext_has_a_threshold_of_its_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "lid.ftz").write_bytes(b"model")
    arguments = [f"--data_dir={tmp_path / 'd'}", f"--inputs={lines(tmp_path / 'a.jsonl', {'text': PROSE * 2})}",
                 f"--language_model={tmp_path / 'lid.ftz'}"]
    monkeypatch.setattr(prepare_data.importlib.util, "find_spec", lambda name: None)
    refused(capsys, "pip install fasttext-predict", "0.995", "FineWeb takes 0.65",
            arguments=[*arguments, "--language_threshold=0.995"])
    monkeypatch.setattr(prepare_data.importlib.util, "find_spec", lambda name: name)
    asked = []
    def predict(text):
        asked.append(text)
        return (["__label__en"], [0.7]) if text else ([], [])
    monkeypatch.setitem(__import__("sys").modules, "fasttext", types.SimpleNamespace(
        load_model=lambda path: types.SimpleNamespace(predict=predict)))
    assert language_of("", str(tmp_path / "lid.ftz"))[0] == "en" and "\n" not in "".join(asked)
    call(*arguments)
    (document,) = documents(tmp_path / "d")
    assert document["language_score"] == 0.7 and audit_of(tmp_path / "d")["settings"]["language_threshold"] == 0.65
    refused(capsys, "'language'", "unsure_language", arguments=[*arguments, "--language_threshold=0.71"])


def test_ascii_is_asked_of_languages_with_latin_letters_only():
    settings = {**SETTINGS, "min_ascii": 0.3}
    for language, reason in (("en", "low_ascii"), ("fr", "low_ascii"), ("ja", None), ("ru", None)):
        assert filters.ascii_share(page(text=JAPANESE * 5, language=language), settings) == reason


def test_what_normalisation_changes_is_counted_by_kind(tmp_path):
    kinds = {"a\x00b": "control_characters", "a\xadb": "soft_hyphens", "a\ufeffb": "byte_order_marks", "a\u200bb": "zero_width_spaces",
             "a\u200eb": "direction_marks", "a\U000e0041b": "annotations_and_tags", "a\ud800b": "surrogates",
             "a\xa0b": "spaces", "e\u0301": "to_nfc"}
    for text, kind in kinds.items():
        found = [name for name in changed_by_normalising(text) if name.startswith("normalised_")]
        assert found == [f"normalised_{kind}"] and normalise(text) != text
    for text in ("plain\r\ntext  ", "café", "a\u2028b", "x\x85y", "می\u200cخواهم"):
        assert changed_by_normalising(text) == []
    lines(tmp_path / "a.jsonl", {"text": "\u202e" + prose("alder")}, {"text": "\u200b\u202e" + prose("birch")}, {"text": prose("fir")})
    run(tmp_path / "d", tmp_path / "a.jsonl")
    notes = {name: note["documents"] for name, note in audit_of(tmp_path / "d")["notes"].items()}
    assert notes["normalised_direction_marks"] == 2 and notes["normalised_zero_width_spaces"] == 1


def test_indentation_can_be_taken_off(tmp_path):
    assert normalise("  a\n\tb", False) == "a\nb" and normalise("  a\n\tb") == "  a\n\tb"


# --------------------------------------------------------------------------------------------------------------------
# The audit and its page

def test_other_thresholds_say_exactly_how_many_more_would_pass(tmp_path):
    sizes = [100, 149, 150, 199, 200, 299, 300, 301, 500]
    made = audit.empty_audit(["length"], {**SETTINGS, "min_chars": 200, "max_chars": 300})
    for size in sizes:
        audit.measure(made, {"characters": size})
    told = made["histograms"]["characters"]
    assert sum(told["counts"]) == 9 and told["edges"] == sorted(set(told["edges"]))
    lower, upper = audit.other_thresholds(told)
    assert dict(lower[1])[150] == 2 and dict(lower[1])[200] == 0
    assert upper[0] == "max_chars" and dict(upper[1])[300] == 0 and dict(upper[1])[500] == 1
    # The same by running it again.
    many(tmp_path / "a.jsonl", 40)
    text = (tmp_path / "a.jsonl").read_text().splitlines()
    lines(tmp_path / "b.jsonl", *({"text": json.loads(line)["text"][:150 + 5 * number]} for number, line in enumerate(text)))
    options = (tmp_path / "b.jsonl", "--minhash_threshold=0", "--languages=()", "--language_threshold=0")
    run(tmp_path / "d", *options, "--min_chars=300")
    expected = dict(dict(audit.other_thresholds(audit_of(tmp_path / "d")["histograms"]["characters"]))["min_chars"])
    for threshold in (200, 200 * 1.5):
        before = len(documents(tmp_path / "d"))
        run(tmp_path / "e", *options, f"--min_chars={int(threshold)}")
        assert len(documents(tmp_path / "e")) - before == expected[threshold] == (20 if threshold == 200 else 0)


def test_every_byte_is_accounted_for_from_the_file_to_the_documents(tmp_path):
    pages = [response(html(prose(name)), f"http://a.example/{name}") for name in NAMES[:6]]
    pages += [response(html("short")), response(html(prose("x")), status="HTTP/1.1 404 No"), b"junk\n" * 9, pages[0]]
    (tmp_path / "a.warc.gz").write_bytes(members(pages)[:-40])
    lines(tmp_path / "b.jsonl", {"text": prose("oak") + "  \u200b "}, {"text": 7}, ["no"])
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe" + prose("yew").encode("utf-16-le"))
    run(tmp_path / "d", tmp_path / "*.*", "--rules=c4_lines_without_end", "--paragraph_min_chars=40", "--mask_personal=True")
    told = audit_of(tmp_path / "d")
    total = lambda name: sum(item["bytes"].get(name, 0) for item in told["inputs"])
    lost = sum(item["losses"].get("skipped_bytes", 0) for item in told["inputs"])
    assert total("bytes_read") == total("bytes_pages") + total("bytes_heads") + total("bytes_other") + lost and lost > 40
    assert total("bytes_file") == sum((tmp_path / name).stat().st_size for name in ("a.warc.gz", "b.jsonl", "c.txt"))
    stages = list(told["filters"].values())
    assert stages[0]["bytes_in"] == total("bytes_pages") + total("bytes_unpacked")
    for stage, after in zip(stages, [*stages[1:], {"bytes_in": sum(entry["bytes"] for entry in told["documents"])}]):
        dropped = sum(reason["bytes"] for reason in stage["reasons"].values())
        assert stage["bytes_in"] == stage["bytes_out"] + stage["bytes_trimmed"] + dropped
        assert stage["bytes_out"] == after["bytes_in"]
    assert told["languages"]["en"] >= 8 and sum(told["domains"].values()) == len(documents(tmp_path / "d"))


def test_the_page_shows_reasons_and_thresholds_and_escapes_what_the_web_says(tmp_path):
    evil = "<script>alert('x')</script>"
    lines(tmp_path / "a.jsonl", {"text": prose("alder"), "url": f"http://a.example/'\"{evil}"}, {"text": evil, "url": evil},
          {"text": GERMAN * 4, "url": "http://b.example/"})
    (tmp_path / f"{evil.replace('/', '')}.jsonl").write_text(json.dumps({"text": prose("fir")}))
    run(tmp_path / "d", tmp_path / "*.jsonl")
    made = (tmp_path / "d" / "audit.html").read_text()
    assert made == page_of(audit_of(tmp_path / "d"))
    assert "<script>alert" not in made and "&lt;script&gt;alert" in made and made.count("<script>") == 1
    for word in ("2 documents of 4 pages", "too_short", "other_language", "language_threshold = 0.995", "<svg", "de<td"):
        assert word in made, word
    assert not re.search(r"(src|href)=", made)
    import html.parser
    stack, empty = [], {"meta", "input", "line", "br", "td", "tr", "th", "p"}
    reader = html.parser.HTMLParser()
    reader.handle_starttag = lambda tag, attributes: tag in empty or stack.append(tag)
    reader.handle_endtag = lambda tag: tag in empty or stack.pop() == tag or pytest.fail(tag)
    reader.feed(made)
    assert stack == []


# --------------------------------------------------------------------------------------------------------------------
# --explain and --inspect

def test_explain_says_what_every_filter_says_and_what_came_after(tmp_path, capsys):
    copy = prose("alder").replace("winter", "summer")
    lines(tmp_path / "a.jsonl", {"text": prose("alder"), "url": "http://a.example/1"}, {"text": copy, "url": "http://a.example/2"},
          {"text": GERMAN * 4, "url": "http://a.example/3", "id": "the-id"}, {"text": prose("fir"), "url": "http://a.example/4"})
    arguments = [f"--data_dir={tmp_path / 'd'}", f"--inputs={tmp_path / 'a.jsonl'}", "--rules=gopher_quality", "--val_fraction=0.5"]
    def explained(url):
        call(*arguments, f"--explain={url}")
        return capsys.readouterr().out
    assert "has not been finished" in explained("http://a.example/1")
    assert not (tmp_path / "d").exists()
    call(*arguments)
    capsys.readouterr()
    said = explained("http://a.example/2")
    assert "passes all filters" in said and "dropped: near_duplicate of http://a.example/1, resemblance=0.9" in said
    assert re.search(r"length +passes +characters \d+ \(min_chars 200\) \(max_chars 1000000\)", said)
    side = {document["url"]: document["split"] for document in documents(tmp_path / "d")}
    for number in (1, 4):
        said = explained(f"http://a.example/{number}")
        assert "  kept\n" in said and f"in the split {side[f'http://a.example/{number}']}" in said
    said = explained("the-id")
    assert re.search(r"language +other_language +de language_score .*\(language_threshold 0.995\)", said)
    assert "gopher_quality" in said.split("other_language")[1] and "dropped: other_language" in said and "Der Zug" in said
    refused(capsys, "no page has the URL or id 'http://no'", arguments=[*arguments, "--explain=http://no"])


def test_explain_names_a_damaged_file_of_decisions(tmp_path, capsys):
    many(tmp_path / "a.jsonl", 3, "http://a.example/")
    run(tmp_path / "d", tmp_path / "a.jsonl")
    url = documents(tmp_path / "d")[0]["url"]
    path = tmp_path / "d" / "work" / "decisions.npz"
    path.write_bytes(path.read_bytes()[:100])
    refused(capsys, "decisions.npz is damaged", "audit.json", arguments=(
        f"--data_dir={tmp_path / 'd'}", f"--inputs={tmp_path / 'a.jsonl'}", f"--explain={url}"))


def test_inspect_shows_the_index_and_decodes_the_first_documents(tmp_path, capsys):
    lines(tmp_path / "a.jsonl", *({"text": prose(name), "url": name} for name in NAMES))
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path / "d" / "tokenizer")
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0.3", "--shard_tokens=3000")
    capsys.readouterr()
    for folder in (tmp_path / "d", tmp_path / "d" / "tokens"):
        call(f"--inspect={folder}")
        said = capsys.readouterr().out
        for word in ("uint16", tokenizer.hash, "train_00001.bin", "<|bos|>The committee met on Tuesday", "bytes of text"):
            assert word in said
        counts = [int(count) for count in re.findall(r"(?:train|val): (\d+) documents", said)]
        assert sum(counts) == 12 and counts == [len(list(read_documents(tmp_path / "d", split))) for split in ("train", "val")]
    tokenizer.__class__([*tokenizer.ranks, b"th"], tokenizer.pattern, {}).save(tmp_path / "d" / "tokenizer")
    call(f"--inspect={tmp_path / 'd'}")
    said = capsys.readouterr().out
    assert "is another one" in said and "The committee" not in said
    refused(capsys, "no token shards", arguments=[f"--inspect={tmp_path}"])
