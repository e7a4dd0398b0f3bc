"""
Instruction tuning: conversations and a pretrained model in, a model that answers and stops out.

    python sft.py config/demo.py                          after train.py and prepare_chat.py
    python sft.py config/demo.py --show=5                 print five conversations, tokens coloured by weight, and end
    torchrun --nproc_per_node=2 sft.py config/demo.py     the same on two processes; --parallel=fsdp: sharded
    python sft.py --init_from=DIR --conversations=MINE.jsonl --val_conversations=MINE_VAL.jsonl --out_dir=out/mine

Two stages, general and then of one's field, where the second keeps a fifth of the first and a tenth of plain text:

    python sft.py --init_from=DIR --conversations=ALL.jsonl --val_conversations=ALL_VAL.jsonl --out_dir=out/general
    python sft.py --init_from=out/general/sft --conversations_mix="{'FIELD.jsonl': 0.8, 'ALL.jsonl': 0.2}" --replay=0.1 \\
        --val_conversations=FIELD_VAL.jsonl --out_dir=out/field

A file of conversations has one JSON object a line,

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}

The form, with loss weights, is described in engine/chat.py.

Like train.py this continues after any interruption, bit for bit, and writes into out_dir/sft: config.json, log.jsonl,
step_NNNNNNNN/ (Hugging Face folders), full_NNNNNNNN/, result.json; with lora_rank (as PEFT reads it) or adapter_size
also adapter/, what was learned alone.

What decides whether tuning works, and where it stands below:
  - Only what the assistant says is a target, and its <|end|>: without that one the model never learns to stop.
  - Padding is another token than any that is learned, and weighs nothing.
  - The loss is a sum over the global step divided by the weight of the global step. Answers differ in length a
    hundredfold, so a mean of means would let the short ones shout (transformers PR 34191 has the history).
  - No conversation can look into another: they share no row, and rows of similar length are put together, which wastes
    little; or with --batching=packed they do, and attention is kept apart (engine/packing.py). Same steps, same losses.
  - A conversation too long for the context is cut (or dropped); when nothing to learn is left of it, it is dropped and
    counted. It must neither wait in a queue for ever nor make a batch without targets, which is 0/0.
"""
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

from configurator import configure

import numpy as np
import torch

from engine import chat, checkpoint, ladder
from engine.alive import Alive
from engine.answers import MEASURED, answer_scores, answers, side_by_side
from engine.files import read_json, write_json
from engine.hf import find_folder, lengthen, load_weights, read_config, read_model
from engine.layout import build, go_through, join, put, wrapped
from engine.loss import model_losses
from engine.monitor import Monitor, read_log
from engine.optim import clip, lr_at, optimiser_problems, optimizers_of, set_lr, warmup_length
from engine.packing import BATCHINGS, collate, cut, pack, plan, text_examples
from engine.parallel import all_sum, bare, finish, share, start
from engine.run import end_step, on_main, open_run, refuse_missing, refuse_once
from engine.shards import TokenData
from engine.tokenizer import Tokenizer
from model import Llama
from techniques import adapters, distill, lora

# data and folders
data_dir = "data/demo"          # its chat/ holds the conversations
out_dir = "out/demo"            # reads out_dir/pretrain, writes into out_dir/sft
init_from = ""                  # folder of the model to tune, of a run or from elsewhere; empty: out_dir/pretrain
conversations = ""              # training file; empty: data_dir/chat/conversations_train.jsonl
conversations_mix: dict | None = None   # several files and their shares of an epoch's conversations, {'a.jsonl': 0.7, ...}
val_conversations = ""          # held-out file; empty: data_dir/chat/conversations_val.jsonl
replay = 0.0                    # share of the trained tokens that is pretraining text, of data_dir/tokens
seed = 1                        # of the order, and of all that is drawn
max_length: int | None = None   # tokens of a conversation; None: the model's context
rope_scaling: dict | None = None    # for a max_length beyond the model's context, as in train.py
template = ""                   # form of conversations, of engine/chat.py's FORMS; empty: the tokenizer's own
overlong = "truncate"           # longer conversations: 'truncate' (what is left must have something to learn) or 'drop'
# the optimisation
batch_size = 64                 # conversations per step over all processes
micro_batch_size = 32           # conversations per process and forward pass; the result is the same for any
batching = "padded"             # 'padded' rows, 'buckets' of a token budget, or 'packed' rows, see engine/packing.py
micro_tokens = 4096             # the budget: positions per process and forward pass; the result is the same for any
window = 16                     # steps whose conversations are sorted by length together; 1: no sorting, if packed
epochs = 1                      # passes over the conversations
max_steps: int | None = None    # None: all steps of the epochs
learning_rate = 1e-3            # peak
matrix_learning_rate = 0.0      # above 0: Muon for the layers' matrices with this peak, AdamW for the rest
schedule = "cosine"             # 'cosine', 'linear' or 'constant'
warmup_steps: int | None = None # None: 0.4 % of the steps, at most 2000, at least a tenth of a short run
final_lr = 0.1                  # the last step's learning rate, as a share of the peak
weight_decay = 0.0              # a short run from good weights has little to forget
beta1 = 0.9                     # of AdamW
beta2 = 0.95                    # likewise
grad_clip = 1.0                 # largest joint norm of all gradients; 0: measured only
dropout = 0.0                   # on the sublayers' outputs
attention = "flash"             # 'flash' or 'fp32', as in train.py
loss_chunk = 0                  # so many targets' logits in memory at a time; 0: those of the whole micro-batch
recompute = "none"              # activations in the backward pass: 'none', 'selective' or 'full', as in train.py
# LoRA (techniques/lora.py): the weights stay, and a difference of low rank is learned; 3 to 10 x the learning rate
lora_rank = 0                   # above 0: LoRA, a difference of that rank is learned; 0: all weights are tuned
lora_alpha = 16.0               # the difference is multiplied by alpha / rank
lora_dropout = 0.0              # of what the difference reads
lora_targets: tuple[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
adapter_size = 0                # above 0: instead of LoRA, bottlenecks of that width (techniques/adapters.py)
# Distillation (techniques/distill.py): a larger model of the same tokenizer says what else could have stood there
teacher = ""                    # folder of a larger model of the same tokenizer, to learn from as well; empty: none
teacher_weight = 0.5            # share of the loss that is the divergence from the teacher
teacher_temperature = 2.0       # both are softened by it
teacher_attention = 0.0         # above 0: what its last layer looks at is learned too, with this weight
# looking and saving
show = 0                        # print this many conversations with their loss weights, and end
eval_every = 100                # steps
eval_conversations = 256        # of the held-out file, always the same ones
eval_answers = 32               # so many of them are answered before and after the tuning; 0: no such comparison
answer_format = ""              # regular expression that an answer as a whole should match
log_every = 10                  # steps
save_light = 1000               # steps between light checkpoints
save_full = 100                 # steps between full ones
keep = 1                        # newest checkpoints of each kind that are kept; 0: all
keep_best = 1                   # light ones that are kept beyond those, for the lowest held-out loss
max_bad_steps = 10              # so many skipped steps in a row end the run
on_spike = "log"                # a gradient norm that leaps, see engine/ladder.py: 'log' it, 'skip' the step, or 'stop'
spike_z = 6.0                   # standard deviations above the mean of the recent norms that are a leap; 0: no matter
spike_norm = 0.0                # after the warm-up a norm above this is a leap as well; 0: no matter
spike_window = 128              # recent norms: those of so many steps
# the machine
device = "auto"                 # 'auto', 'cpu' or 'cuda'
dtype = "auto"                  # of matrix products: 'auto' (bf16 where the machine has it), 'bf16', 'fp32'
compile = False                 # torch.compile, per block; pays in a run of more than some hundred steps
deterministic: bool | None = None   # same bits in every run; None: on a CPU yes
threads = 0                     # of a CPU; 0: its cores, divided by the processes
# several processes, as in train.py
parallel = "ddp"                # 'ddp': every rank holds everything; 'fsdp': states are sharded over the ranks
zero = 3                        # under fsdp: 1 the optimizer's states, 2 also gradients, 3 also weights
hsdp = 1                        # under fsdp: so many groups of ranks, each of which shards within itself
cpu_offload = False             # under fsdp: states in the CPU's memory


# --- Conversations -> ids and weights ---------------------------------------------------------------------------------

def encode(entries, tokenizer, length, overlong):
    """[(ids, weights)] of all conversations that have something to learn, and counts of what happened to the others.

    ids int64 (L,), weights float32 (L,), 2 <= L <= length + 1: one more than the context, since the last is only a
    target."""
    examples, counts = [], {"truncated": 0, "too_long": 0, "without_target": 0}
    for entry in entries:
        ids, weights = chat.render(tokenizer, entry["messages"])
        if len(ids) > length + 1:
            if overlong == "drop":
                counts["too_long"] += 1
                continue
            # Cut, and not ended with an <|end|> of ours: that would teach to stop in the middle of a sentence.
            ids, weights = ids[:length + 1], weights[:length + 1]
            counts["truncated"] += 1
        weights = np.array(weights, dtype=np.float32)          # in which 1e-300 is nothing
        if weights[1:].sum() == 0:
            counts["without_target"] += 1
            continue
        examples.append((np.array(ids, dtype=np.int64), weights))
    return examples, counts


def encode_file(path, tokenizer, length, config, setup, at_most=None):
    """encode for the conversations of a file; says how many were cut or left out, and refuses when nothing is left."""
    entries = chat.read_conversations(path)
    count = min(at_most or len(entries), len(entries))                     # spread over the whole file
    entries = [entries[i * len(entries) // count] for i in range(count)]
    examples, counts = encode(entries, tokenizer, length, config.overlong)
    if not examples:
        refuse_once(setup, f"{path}: no conversation is left to learn from: {counts['too_long']} are longer than "
                    f"{length} tokens, {counts['without_target']} have no trained token (of weight above 0). "
                    "Raise max_length, use a model with a longer context, or shorten the conversations.")
    if any(counts.values()):
        setup.say(f"note: {path}: {counts['truncated']} conversations cut at {length} tokens, {counts['too_long']} "
                  f"left out as too long, {counts['without_target']} left out since nothing in them is trained")
    return examples, counts


def gather(mix, text, tokenizer, length, config, setup):
    """What a run learns from. mix: {file: share}; text: the folder of pretraining text.

    -> examples, source after source, text last; how many each source has; how many of them an epoch takes; counts of
    what was cut or left out; and what all of it was made from, for open_run.
    An epoch takes each conversation of a single file once; of several files as many as there are in all, in the given
    shares; and so much text, weighed so that rounding does not show, that `replay` of the trained weight is text."""
    parts, lost = [], {}
    for path in mix:
        part, counted = encode_file(path, tokenizer, length, config, setup)
        parts.append(part)
        lost = {name: lost.get(name, 0) + count for name, count in counted.items()}
    sizes, shares = [len(part) for part in parts], np.cumsum(list(mix.values()))
    counts = sizes[:]
    if len(mix) > 1:
        counts = np.diff(np.rint(shares / shares[-1] * sum(sizes)), prepend=0).astype(int).tolist()
    inputs = {"conversations" + f" {path}" * (len(mix) > 1): path for path in mix}
    if config.replay:
        data = TokenData(text, "train", tokenizer.hash, config.command("prepare_data.py"))
        mean = lambda part: np.mean([weights[1:].sum() for _, weights in part])
        wanted = sum(count * mean(part) for count, part in zip(counts, parts)) * config.replay / (1 - config.replay)
        pieces = text_examples(data, tokenizer, length, wanted * config.epochs, config.seed)
        counts.append(max(1, round(wanted / mean(pieces))))
        pieces = pieces[:counts[-1] * config.epochs]                        # each of them once in the run
        weight = np.float32(wanted / (counts[-1] * mean(pieces)))
        parts.append([(ids, weights * weight) for ids, weights in pieces])
        sizes.append(len(pieces))
        inputs["text"] = data.data_hash[:16]
    return sum(parts, []), sizes, counts, lost, inputs


# --- One step ---------------------------------------------------------------------------------------------------------

def micro_batches(examples, numbers, config, pad_id, setup):
    """This rank's share of a global step, cut into micro-batches (inputs, targets, weights) and, packed, begins.

    All ranks get as many, since sharded weights are gathered in each: one that has fewer conversations, or none of a
    short last step, computes a row that weighs nothing."""
    if config.batching != "padded":                 # the longest first, so that the ranks get about as many tokens each
        numbers = sorted(numbers, key=lambda number: -len(examples[number][0]))
    form = pack if config.batching == "packed" else collate
    shares = [numbers[rank::setup.world] for rank in range(setup.world)]
    cuts = [cut([len(examples[number][0]) - 1 for number in share], config.batching, config.micro_batch_size,
                config.micro_tokens) for share in shares]
    mine = shares[setup.rank]
    batches = [form(examples, [mine[place] for place in places], pad_id) for places in cuts[setup.rank]]
    if lacking := max(map(len, cuts)) - len(batches):
        x, y, w, *begins = form(examples, numbers[-1:], pad_id)
        batches += [(x, y, torch.zeros_like(w), *begins)] * lacking
    return [tuple(tensor.to(setup.device) for tensor in batch) for batch in batches]


def weighted_losses(model, x, y, w, setup, chunk=0, teacher=None, begins=None):
    """(N,) fp32: the losses of a batch's N targets, times their weights. Only these reach the model's last layer."""
    keep = w > 0                                                           # (B, T)
    with setup.autocast():
        if teacher:
            return teacher.losses(model, x, y[keep], keep, begins)[0] * w[keep]
        _, losses = model_losses(model, x, y[keep], chunk, keep=keep, begins=begins)
    return losses * w[keep]


def forward_backward(model, batches, end_id, setup, chunk=0, teacher=None):
    """Gradients of the global step's weighted mean loss, left in the parameters.

    -> over all ranks: loss, loss_end (of <|end|> alone), weight (of all targets), positions (padding included)"""
    weight = all_sum(sum(w.sum(dtype=torch.float64) for _, _, w, *_ in batches), setup)
    total = torch.zeros(4, dtype=torch.float64, device=setup.device)

    def score(x, y, w, *begins):
        losses = weighted_losses(model, x, y, w, setup, chunk, teacher, *begins)
        found, at_end = losses.detach().double(), y == end_id
        total.add_(torch.stack([found.sum(), found[at_end[w > 0]].sum(), w[at_end].sum().double(),
                                torch.ones_like(w).sum().double()]))
        # By the global weight, not by this micro-batch's. DDP and FSDP divide by the number of ranks, hence the factor.
        return losses.sum() * setup.world / weight.float()

    go_through(model, batches, score)
    loss, end_loss, end_weight, positions = all_sum(total, setup).tolist()
    return {"loss": loss / weight.item(), "loss_end": end_loss / max(end_weight, 1e-9), "weight": weight.item(),
            "positions": int(positions)}


@torch.no_grad()
@torch.compiler.set_stance("force_eager")       # compiling for so few batches would take longer than they do
def evaluate(model, examples, config, pad_id, setup):
    """Weighted mean loss over held-out conversations, divided over the ranks."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=setup.device)
    order = np.argsort([len(ids) for ids, _ in examples], kind="stable")

    def score(x, y, w, *begins):
        losses = weighted_losses(bare(model), x, y, w, setup, config.loss_chunk, None, *begins)
        total.add_(torch.stack([losses.sum().double(), w.sum().double()]))

    go_through(model, micro_batches(examples, order, config, pad_id, setup), score, backward=False)
    model.train()
    loss, weight = all_sum(total, setup).tolist()
    return loss / weight


def answered(model, folder, tokenizer, path, text, length, config, setup):
    """How the model answers held-out questions, greedily (engine/answers.py), and its loss on held-out pretraining text
    where there is any with its tokenizer: what tuning makes it forget. folder: where the model's weights lie now, to be
    read by rank 0 when the ranks hold parts only."""
    found = {"text_loss": None}
    if read_json(text / "index.json", {}).get("tokenizer_hash") == tokenizer.hash:
        pages = text_examples(TokenData(text, "val"), tokenizer, length, 16384, seed=0)
        found["text_loss"] = evaluate(model, pages, config, tokenizer.pad_id, setup)
    if setup.is_main:
        entries = chat.read_conversations(path)
        entries = entries[::max(1, len(entries) // config.eval_answers)][:config.eval_answers]
        asked = SimpleNamespace(batch_size=config.micro_batch_size, seed=config.seed, max_new_tokens=128)
        same = {key: getattr(bare(model).config, key) for key in ("attention", "block_size", "rope_scaling")}
        with (lora.merged(bare(model)) if setup.layout.plain else nullcontext(
                read_model(folder, **same)[0].to(setup.device))) as whole:
            made = answers(whole, tokenizer, [{"messages": entry["messages"][:-1]} for entry in entries], asked)
        found.update(answer_scores(made, config.answer_format))
    return found


def check(config, shape, setup):
    """Everything about the settings that can not work, at once; -> how the ranks divide the work."""
    problems = config.below_one("batch_size", "micro_batch_size", "micro_tokens", "window", "epochs", "log_every",
                                "eval_every", "eval_conversations", "max_steps") + ladder.ladder_problems(config)
    mix, few = config.conversations_mix, config.lora_rank or config.adapter_size
    problems += [sentence for sentence, wrong in {
        f"max_length must lie between 2 and the model's context, {shape.block_size} (or choose a rope_scaling); found "
        f"{config.max_length}": config.max_length is not None and not 2 <= config.max_length <= shape.block_size,
        f"overlong must be 'truncate' or 'drop', found '{config.overlong}'":
            config.overlong not in ("truncate", "drop"),
        f"batching must be one of {', '.join(BATCHINGS)}, found '{config.batching}'": config.batching not in BATCHINGS,
        **{f"batching = 'packed' {sentence}": config.batching == "packed" for sentence in shape.inseparable()},
        f"conversations_mix must be files and their shares, numbers above 0; found {mix}": mix is not None and not (
            mix and all(type(share) in (int, float) and share > 0 for share in mix.values())),
        "matrix_learning_rate (Muon) is for whole matrices; with lora_rank or adapter_size leave it at 0":
            few and config.matrix_learning_rate,
        "lora_rank and adapter_size are two ways to the same end: choose one": config.lora_rank and shape.adapter_size,
    }.items() if wrong] + config.outside(loss_chunk=(0,), eval_answers=(0,), replay=(0, 0.99))
    problems += lora.problems(config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_targets)
    layout, wrong = share(config, setup.world)
    refuse_once(setup, *problems, *wrong, *optimiser_problems(config), *shape.problems())
    return layout


def main(config):
    setup = start(config.device, config.dtype, config.deterministic, config.threads, config.seed)
    with Alive(setup) as alive:
        tune(config, setup, alive)


def tune(config, setup, alive):
    # 1. The model to tune, and one run per folder.
    data = Path(config.data_dir) / "chat"
    path = Path(config.conversations or data / "conversations_train.jsonl")
    val_path = Path(config.val_conversations or data / "conversations_val.jsonl")
    source = Path(config.init_from or Path(config.out_dir) / "pretrain")
    mix = {Path(str(name)): share for name, share in (config.conversations_mix or {path: 1.0}).items()}
    if (config.conversations or config.conversations_mix) and not config.val_conversations:
        refuse_once(setup, f"conversations = {', '.join(map(str, mix))}, but no val_conversations: hold some of yours "
                    f"out and name their file, or the held-out loss would be that of {val_path}")
    text = {data.parent / "tokens/index.json": "pretraining text to replay"} if config.replay > 0 else {}
    # How to come by what was not named; of a name that is wrong it is enough to say so.
    advice = [f"  {config.command(script)}      {makes}, or give your own: {own}" for script, makes, own, named, paths in (
        ("prepare_chat.py", "the demonstration's conversations",
         "--conversations=MINE.jsonl --val_conversations=MINE_VAL.jsonl", config.val_conversations, [*mix, val_path]),
        ("train.py", "a model", "--init_from=DIR", config.init_from, [source]),
        ("prepare_data.py", "shards", "--data_dir=DIR", False, text))
        if not named and not all(path.exists() for path in paths)]
    refuse_missing(setup, {**dict.fromkeys(mix, "conversations to learn from"), val_path: "conversations held out",
                           source: "pretrained model to tune", **text}, *advice)
    source, settings = find_folder(source), {
        "attention": config.attention, "dropout": config.dropout, "recompute": config.recompute}
    theirs = read_config(source)
    shape = replace(theirs, **settings, adapter_size=config.adapter_size or theirs.adapter_size)
    if config.rope_scaling is not None:
        shape = lengthen(shape, config.max_length or 0, config.rope_scaling, source, key="max_length")
    setup = join(setup, check(config, shape, setup))
    tokenizer = Tokenizer.load(source)
    if config.template:
        chat.adopt(tokenizer, config.template)

    teacher, teachers_folder, wrong = distill.open_teacher(config, tokenizer, setup)
    refuse_once(setup, *wrong)

    # 2. Conversations as ids and weights, and what became of those that do not fit.
    length = config.max_length or shape.block_size
    examples, sizes, counts, lost, inputs = gather(mix, data.parent / "tokens", tokenizer, length, config, setup)
    val_examples, _ = encode_file(val_path, tokenizer, length, config, setup, at_most=config.eval_conversations)
    if config.show:
        setup.say(chat.LEGEND + "\n")
        for ids, weights in examples[:config.show]:
            setup.say(chat.coloured(tokenizer, ids.tolist(), weights.tolist()) + "\n")
        finish(setup)
        return
    with torch.device("meta"):
        size = Llama(shape).n_params()
    few = config.lora_rank or config.adapter_size               # are learned, of all
    run, lock = open_run(config, "sft", setup, size, size if few else 0, model=source, **inputs,
                         **({"teacher": teachers_folder} if teacher else {}))
    if lock is None:
        return

    # 3. The model, on its devices, with LoRA or adapters. Continue where an earlier call stopped.
    def make():
        model = Llama(shape)
        if config.lora_rank:
            lora.add(model, config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_targets, seed=None)
        elif config.adapter_size:
            adapters.freeze(model)
        return model

    def fill(model):
        new = few and not theirs.adapter_size                   # adapters that the folder has are learned further
        load_weights(model, source, put, new=adapters.PARTS if new else ())
        if new:
            adapters.draw(model, config.seed, put)

    model = build(make, setup, config.seed, config.compile, dynamic=True, fill=fill).train()
    model.n_tokens = tokenizer.vocab_size           # the rows behind those only pad the vocabulary
    optimizers = optimizers_of(model, config.learning_rate, config.matrix_learning_rate, config.weight_decay,
                               (config.beta1, config.beta2))
    modules, moments = {"model": model}, {"model": optimizers}
    state = checkpoint.resume(run, modules, moments, setup) or {"step": 0}
    past = ladder.Past(config, state)
    model = wrapped(model, setup)

    # 4. What it will cost.
    lengths = np.array([len(ids) for ids, _ in examples])
    mass = np.array([weights[1:].sum() for _, weights in examples])
    n_talks = len(examples) - (sizes[-1] if config.replay else 0)                       # behind them: text
    per_epoch = math.ceil(sum(counts) / config.batch_size)
    max_steps = config.max_steps or per_epoch * config.epochs
    warmup = warmup_length(max_steps, config.warmup_steps)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shared = f"; {sum(counts):,} in an epoch, of the sources {counts}" * (counts != [n_talks])
    setup.say(f"model       {size:,} parameters from {source}, {trained:,} of them trained\n"
              f"machine     {setup.world} process(es) on {setup.device.type}, {str(setup.dtype)[6:]}, "
              f"{setup.threads} threads; {setup.layout}\n"
              f"data        {n_talks:,} conversations of {lengths[:n_talks].mean():.0f} tokens on average, "
              f"{lengths.max()} at most{shared}\n"
              f"run         {max_steps:,} steps of {config.batch_size} conversations, {max_steps / per_epoch:.2f} "
              f"epochs; warm-up {warmup} steps")
    if config.max_steps is None and max_steps < 20:
        setup.say(f"note        {max_steps} steps are few: more epochs or a smaller batch_size make more of them")
    end_id = tokenizer.special(chat.end_token(tokenizer))
    monitor = Monitor(run, setup, max_steps, state["step"], label="sft")
    measure = lambda folder: answered(model, folder, tokenizer, val_path, data.parent / "tokens", length, config, setup)
    if state["step"] == 0 and config.eval_answers:
        before = measure(source)
        on_main(lambda: write_json(run / "before.json", before), setup)

    # 5. The loop.
    plan_of = lru_cache(1)(partial(plan, lengths, sizes, counts, config.batch_size, config.window, config.seed))
    for step in range(state["step"], max_steps):
        began, numbers = time.perf_counter(), plan_of(step // per_epoch)[step % per_epoch]
        batches = micro_batches(examples, numbers, config, tokenizer.pad_id, setup)
        totals = forward_backward(model, batches, end_id, setup, config.loss_chunk, teacher)
        norm = clip(model.parameters(), config.grad_clip, setup).item()
        wrong, deed = past.judge(totals["loss"], norm, step >= warmup)                   # the same on every rank
        lr = lr_at(step, max_steps, config.learning_rate, warmup, config.schedule, config.final_lr)
        for optimizer in optimizers:
            set_lr(optimizer, lr)
            if not deed:
                optimizer.step()                    # never with a NaN: in Adam's moments it would stay
            optimizer.zero_grad(set_to_none=not setup.layout.in_buckets)
        done, seconds = step + 1, time.perf_counter() - began
        first, last = step == state["step"], done == max_steps

        record, line = {}, ""
        if deed:
            record = {"loss": totals["loss"], "grad_norm": norm, "skipped": True, "wrong": wrong,
                      "conversations": numbers}
            line = f"{wrong}: step skipped, {past.in_a_row} in a row"
        elif wrong or first or last or done % config.log_every == 0:
            padding, speed = 1 - (lengths[numbers] - 1).sum() / totals["positions"], totals["positions"] / seconds
            record = {**totals, "lr": lr, "grad_norm": norm, "padding": padding, "tokens_per_second": speed,
                      "step_seconds": seconds,
                      **({"replay": float(mass[numbers[numbers >= n_talks]].sum() / mass[numbers].sum())}
                         if config.replay else {})}
            line = (f"loss {totals['loss']:.4f}  end {totals['loss_end']:.4f}  lr {lr:.2e}  norm {norm:.2f}  "
                    f"{speed:,.0f} tokens/s  padding {padding:.0%}  {wrong}")
        if last or done % config.eval_every == 0:
            record["val_loss"] = evaluate(model, val_examples, config, tokenizer.pad_id, setup)
            line += f"  held-out loss {record['val_loss']:.4f}"
        if record:
            monitor.log(done, line.strip(), **record)
        if deed == "stop":
            on_main(lambda: ladder.decide(deed, run, step, wrong, past.in_a_row, [], [], config), setup)
        facts = {**past.facts(), "config_hash": config.hash, "tokenizer_hash": tokenizer.hash,
                 "val_loss": record.get("val_loss")}
        leaving = alive.leaving()
        end_step(run, done, max_steps, config, modules, moments, tokenizer, facts, setup, monitor, leaving,
                 plain=lora.merged)
        monitor.advance()

    # 6. The end.
    monitor.close()
    tuned = checkpoint.folder_of(run, "light", max_steps)
    before, after = read_json(run / "before.json", {}), measure(tuned) if config.eval_answers else {}
    if after:
        setup.say(side_by_side(before=before, after=after))
    if few:
        (lora if config.lora_rank else adapters).save(run / "adapter", bare(model), source, tokenizer, setup.is_main)
    if setup.is_main:
        final = read_log(run)[-1]       # and not local names: a run may be killed between its last step and here
        write_json(run / "result.json", {
            "steps": max_steps, "conversations": n_talks, "epochs": max_steps / per_epoch,
            "train_loss": final["loss"], "val_loss": final["val_loss"], **lost,
            **{when: {name: found.get(name) for name in MEASURED}
               for when, found in (("before", before), ("after", after))}})
    setup.say(f"tuned model in {tuned}")
    finish(setup)


if __name__ == "__main__":
    main(configure(globals()))
