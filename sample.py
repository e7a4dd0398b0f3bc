"""
Stage 6: talk to a model.

    python sample.py --model=out/demo/pretrain --prompt="The function"      continue a text
    python sample.py config/demo.py --chat=True                     a conversation; an empty line starts a new one
    python sample.py config/demo.py --chat=True --prompt="Hello?"   one question, one answer
    python sample.py config/demo.py --file=prompts.jsonl            a batch; answers as JSONL on standard output
    python sample.py --model=DIR ...                                a Hugging Face folder of a Llama, or a stage's of a run
    python sample.py --model=out/mine/sft/adapter ...               LoRA or adapters alone, on the model that they name

Without --model the furthest stage that has a checkpoint in out_dir speaks: ppo, else sft, else pretrain.

A file is JSONL, each line with "prompt": text (continued as text, or answered with --chat=True) or "messages"
(answered). Each line comes back with "completion", the number of "tokens", whether it "stopped" by itself, and whether
the prompt was "cut"; how far it is, is told on standard error. In a conversation `/reset` (or an empty line) starts
a new one, and `/save FILE` appends what was said to a file of conversations, the form that sft.py reads.

temperature=0 always takes the likeliest token. A prompt has to leave room for max_new_tokens, or for half the context
if that is less: a text that does not loses its beginning (after BOS), a conversation its oldest turns, and a note
says so. Generation ends where the context does.
"""

import io
import json
import os
import re
import sys
import time
from pathlib import Path

from tqdm import tqdm

from configurator import configure, refuse
from engine import parallel
from engine.chat import read_lines, render, stop_ids, wrong_messages
from engine.files import printable
from engine.generate import generate
from engine.manifest import steps_of
from techniques.lora import load_model

out_dir = "out/demo"        # the run whose model speaks
model = ""                  # a Hugging Face folder, or the folder of one stage, instead
prompt = ""                 # the text to continue or, with --chat=True, the question
file = ""                   # a file of prompts
chat = False                # prompts are questions of a user, answered by the assistant
system = ""                 # system message of every conversation
max_new_tokens = 200        # longest answer, in tokens
temperature = 0.8           # below 1: likelier tokens more often; 0: only the likeliest
top_k = 50                  # choose among so many likeliest tokens; 0: among all
top_p = 1.0                 # choose among the likeliest tokens that together have this probability
repetition_penalty = 1.0    # above 1: what was said already becomes less likely
stop: tuple[str] = ()       # texts before which an answer ends, besides the tokens that end it
seed = 1                    # the same seed, the same answer (of the same batch)
batch_size = 16             # prompts of a file that are continued side by side
compile = False             # compile the step that makes a token: a minute at first, then faster, on CUDA above all
device = "auto"             # cpu, cuda, or what there is
dtype = "auto"              # bf16, fp32, or what suits the machine
threads = 0                 # of the CPU; 0: all cores

SAY_EVERY = 10              # seconds between lines about a file, where there is no terminal for a bar


def find_model(config):
    """The folder that was named, or the furthest stage of this run that has a checkpoint."""
    if config.model:
        return Path(config.model)
    stages = [Path(config.out_dir) / stage for stage in ("ppo", "sft", "pretrain")]
    found = next((stage for stage in stages if stage.is_dir() and steps_of(stage, "light")), None)
    return found or refuse(f"no checkpoint in {', '.join(map(str, stages))}. Train one ({config.command('train')}), "
                           "or name a folder with --model=DIR.")


class Speaker:
    """A model with its tokenizer and the way to sample, so that the three ways of asking share one way to answer."""

    def __init__(self, config, model, tokenizer):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.context = model.config.block_size
        self.longest = self.context - min(config.max_new_tokens, self.context // 2)     # of a prompt

    def prompt(self, entry):
        """Of {"messages"} or {"prompt"}: a question with --chat=True, else a text to continue. -> (ids, whether cut)"""
        if "messages" in entry or self.config.chat:
            return self.chat_prompt(entry.get("messages") or [{"role": "user", "content": entry["prompt"]}])
        return self.text_prompt(entry["prompt"])

    def opening(self):
        """The messages that a conversation begins with: the system message, where there is one."""
        return [{"role": "system", "content": self.config.system}] if self.config.system else []

    def text_prompt(self, text):
        """-> (ids, whether something was cut). BOS stands before it, where the tokenizer has one."""
        bos = [self.tokenizer.bos_id] if self.tokenizer.bos_id is not None else []
        ids = self.tokenizer.encode(text)
        if not bos and not ids:
            refuse("the prompt is empty, and this tokenizer has no BOS token to begin with instead: give a --prompt.")
        return [*bos, *ids[len(bos) - self.longest:]], len(ids) + len(bos) > self.longest

    def chat_prompt(self, messages):
        """-> (ids, whether something was cut). The system message stays; the oldest turns go, then the start of one."""
        system = [message for message in messages if message["role"] == "system"] or self.opening()
        turns = [message for message in messages if message["role"] != "system"]
        kept = turns
        while len(ids := self.render(system + kept)) > self.longest and len(kept) > 1:
            kept = kept[2:]
        cut = len(ids) > self.longest or kept != turns
        if len(ids) > self.longest:
            rest = self.tokenizer.encode(kept[0]["content"])[len(ids) - self.longest:]
            # Half a character at the cut would be spelt with more tokens than it was.
            rest = self.tokenizer.decode(rest).lstrip("\ufffd")
            ids = self.render([*system, {"role": "user", "content": rest}])
        return ids[-(self.context - 1):], cut

    def render(self, messages):
        return render(self.tokenizer, messages, open_assistant=True)[0]

    def answer(self, prompts, seed=0, on_text=None):
        config = self.config
        return generate(
            self.model, prompts, config.max_new_tokens, stop_ids(self.tokenizer), config.temperature, config.top_k,
            config.top_p, config.seed + seed, repetition_penalty=config.repetition_penalty, on_text=on_text,
            tokenizer=self.tokenizer, stop_strings=config.stop, compile=config.compile)

    def speak(self, ids, cut):
        """Answers one prompt on the terminal, as the text comes. -> the text"""
        if cut:
            note("the prompt is longer than the context leaves room for: its beginning was left out")
        result = self.answer([ids], on_text=lambda row, text: print(printable(text), end="", flush=True))
        print(flush=True)
        if not result.stopped[0]:
            full = len(ids) + len(result.ids[0]) >= self.context
            note("ended by the context's end" if full else f"ended by max_new_tokens = {self.config.max_new_tokens}")
        return result.texts[0]


def note(text):
    print(f"[{text}]", file=sys.stderr, flush=True)


def conversation(speaker):
    """The chat loop: reads questions until the input ends, or Ctrl-C."""
    messages = speaker.opening()
    note("/reset or an empty line starts a new conversation, /save FILE keeps this one; Ctrl-D ends")
    try:
        while True:
            question = input("\nyou> ")
            command, _, name = question.strip().partition(" ")
            if command in ("", "/reset"):
                messages = speaker.opening()
                note("a new conversation")
            elif command == "/save":
                note(save(name.strip(), messages))
            elif re.fullmatch("/[a-z]+", command):
                note(f"there is no {command}; there are /reset and /save FILE")
            else:
                messages.append({"role": "user", "content": question})
                print("model> ", end="", flush=True)
                messages.append({"role": "assistant", "content": speaker.speak(*speaker.chat_prompt(messages))})
    except (EOFError, KeyboardInterrupt):
        print()


def save(path, messages):
    """Appends a conversation to a file of conversations, as engine/chat.py reads them. -> what to say about it"""
    if not any(message["role"] == "assistant" for message in messages):
        return "not saved: there is no answer yet"
    wrong = wrong_messages({"messages": messages}, "messages", last="assistant")
    if not path or wrong:
        return "; ".join(["not saved", *wrong] if path else ["/save needs the name of a file"])
    try:
        with open(path, "ab+") as file:
            # Behind a last line that has no end, a line of ours would be part of it.
            torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n"
            file.write(b"\n" * torn + json.dumps({"messages": messages}).encode() + b"\n")
    except (OSError, ValueError) as error:          # a name may have a NUL in it
        return f"not saved: {printable(path)}: {getattr(error, 'strerror', None) or error}"
    return f"{sum(message['role'] == 'user' for message in messages)} questions and their answers added to {path}"


def wrong_entry(entry):
    """What is wrong with one line of a file of prompts."""
    if "messages" in entry:
        return wrong_messages(entry, "messages", last="user")
    return [] if isinstance(entry.get("prompt"), str) else ['expected "prompt" with a text, or "messages"']


def batch(config, speaker, entries):
    """Answers the prompts of a file, batch_size at a time, in order."""
    cuts, tokens = 0, 0
    begun = said = time.monotonic()
    bar = tqdm(total=len(entries), unit=" prompts", disable=not sys.stderr.isatty() or sys.stdout.isatty())
    for start in range(0, len(entries), config.batch_size):
        part = entries[start:start + config.batch_size]
        prompts = [speaker.prompt(entry) for entry in part]
        result = speaker.answer([ids for ids, _ in prompts], seed=start)
        for entry, (_, cut), ids, text, stopped in zip(part, prompts, result.ids, result.texts, result.stopped):
            answer = {"completion": text, "tokens": len(ids), "stopped": stopped, "cut": cut}
            # Escaped to ASCII: whatever the model says, a line stays one line, and a terminal obeys none of it.
            print(json.dumps({**entry, **answer}), flush=True)
            cuts += cut
            tokens += len(ids)
        done, now = start + len(part), time.monotonic()
        bar.update(len(part))
        if done == len(entries) or now - said > SAY_EVERY and bar.disable:
            note(f"{done} of {len(entries)} prompts, {tokens / (now - begun):,.0f} tokens/s")
            said = now
    bar.close()
    if cuts:
        note(f"{cuts} of {len(entries)} prompts are longer than the context leaves room for: they lost their beginning")


def main(config):
    bounds = config.outside(top_k=(0,), top_p=(1e-9, 1), repetition_penalty=(0.01, 100))
    refuse(*config.below_one("max_new_tokens", "batch_size"), *bounds, *(problem for problem, holds in {
        f"temperature must be 0 (greedy) or at least 0.01, found {config.temperature}":
            config.temperature != 0 and config.temperature < 0.01,
        "stop must not have an empty text in it: every answer ends before that": "" in config.stop,
        "--file and --prompt are both given; it can only be one": config.file and config.prompt,
        "--system needs --chat=True: only conversations have one": config.system and not (config.chat or config.file),
    }.items() if holds))
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):     # a terminal may not know UTF-8
            stream.reconfigure(errors="replace")

    entries = read_lines(config.file, wrong_entry) if config.file else []

    # 1. The model. What is said about it goes to stderr: standard output belongs to the answers.
    setup = parallel.start(config.device, config.dtype, threads=config.threads, seed=config.seed)
    folder = find_model(config)
    net, tokenizer = load_model(folder, dtype=setup.dtype)
    speaker = Speaker(config, net.to(setup.device), tokenizer)
    note(f"{folder}: {net.n_params():,} parameters, context {speaker.context}, {setup.device} {setup.dtype}")

    # 2. Ask it.
    if config.file:
        batch(config, speaker, entries)
    elif config.chat and not config.prompt:
        conversation(speaker)
    else:
        print("" if config.chat else printable(config.prompt), end="", flush=True)
        speaker.speak(*speaker.prompt({"prompt": config.prompt}))


if __name__ == "__main__":
    main(configure(globals()))
