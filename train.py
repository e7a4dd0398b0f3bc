"""
Pretraining: token shards in, a Llama out.

    python train.py config/demo.py                                      one process, CPU or one GPU
    torchrun --nproc_per_node=8 train.py config/llama2_7b.py            eight GPUs of one machine
    torchrun --nproc_per_node=2 train.py config/demo.py --device=cpu    two processes on a CPU (gloo)
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/llama2_7b.py
    python train.py config/llama2_7b.py --plan=8                        no training: memory, days, traffic, checkpoints

Give the same command again after any interruption: it continues from the newest full checkpoint that is sound, and on a
CPU comes to the same weights, bit for bit, as if nothing had happened. A finished run does nothing. SIGTERM or SIGUSR1
to any process: everything is saved after the step, exit status 75 ("try again"; torchrun makes 1 of it).

Needs data_dir/tokens (prepare_data.py) and data_dir/tokenizer (train_tokenizer.py). Writes, in out_dir/pretrain:

    config.json          the configuration, versions, commit; in config_hash.txt its hash, and those of code and data
    log.jsonl            one line per logged step, see engine/gauges.py; tensorboard/ has the same numbers
    step_NNNNNNNN/       light checkpoints: Hugging Face folders
    full_NNNNNNNN/       full checkpoints: what a run continues from
    samples/             with log_samples: which blocks each rank took in each step (doctor.py --order=DIR proves them)
    rollbacks.json       where the run went back past bad data (on_spike), and which documents these were
    result.json          the numbers of the finished run
"""
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from configurator import configure, refuse

import torch

from engine import checkpoint, ladder
from engine.alive import Alive
from engine.files import write_json
from engine.gauges import Gauges, flops_per_token
from engine.hf import find_folder, inexpressible, lengthen, load_weights, read_config
from engine.layout import build, go_through, join, put, wrapped
from engine.loader import open_mixture, plan_step, read_ahead
from engine.loss import model_losses
from engine.memory import Explained
from engine.monitor import Monitor, read_log
from engine.optim import clip, lr_at, optimiser_problems, optimizers_of, set_lr, warmup_length
from engine.parallel import bare, data_sum, divide, finish, from_main, keep_memory, my_share, refuse_once, start
from engine.preflight import refuse_other_batch
from engine.run import end_step, on_main, open_run, refuse_missing
from engine.samples import log_sample, open_samples
from engine.shards import batch, begins_of
from engine.tokenizer import Tokenizer, find_tokenizer
from engine.watch import LAST_PHASE, Watch, watch_problems
from model import Llama, ModelConfig
from techniques import distill

# data and folders
data_dir = "data/demo"          # tokenizer and token shards
data_mix: dict | None = None    # shards of several folders and their weights, {'data/a': 0.7, 'data/b': 0.3}; data_dir's tokenizer
out_dir = "out/demo"            # everything is written into out_dir/pretrain
init_from = ""                  # a model folder to start from instead of random weights; its shape is taken over
resume_from = ""                # a full checkpoint of another run, to continue from until this run has one of its own
trust_state = False             # read it although it lies outside out_dir: it can run any code that its writer put in
seed = 1                        # of weights, order and dropout
# the model
n_layer = 6
n_head = 6
n_kv_head = 6                   # fewer than n_head: grouped-query attention
n_embd = 384
n_inner = 1024                  # width of the SwiGLU: 8/3 of n_embd
vocab_size = 0                  # 0: the tokenizer's
block_size = 256                # tokens of context
rope_theta = 10000.0
norm_eps = 1e-5
tie_embeddings = True           # one matrix to embed and to score; Llama 2 has two
dropout = 0.0                   # on the sublayers' outputs
attention = "flash"             # 'flash': SDPA; 'fp32': the same in the open, slower; 'bf16': its scores rounded, a mistake
separate_documents = False      # documents in one block do not see each other, and each begins at position 0
head_dim = 0                    # width of a head; 0: n_embd / n_head
qkv_bias = False                # q, k and v have a bias, as in Qwen 1.5 to 2.5
qk_norm = False                 # q and k are normalised, as in Qwen3
sliding_window = 0              # a token sees so many, itself among them, as in Mistral; 0: all before it
rope_scaling: dict | None = None    # RoPE stretched: {'rope_type': 'yarn', 'factor': 4.0, ...}, see model.py
family = ""                     # whose files checkpoints are written as; '': the plainest that can say all this
n_future = 1                    # tokens ahead that are predicted; 2: a second head learns the token after the next
adapter_size = 0                # bottlenecks behind the sublayers, as sft.py adds them (techniques/adapters.py)
# the optimisation
batch_tokens = 16384            # tokens per step over all processes, so a step means the same on any number of them
micro_batch_size = 16           # sequences per process and forward pass: memory against speed, the result is the same
max_steps = 1000
learning_rate = 1e-3            # peak, after the warm-up
z_loss = 0.0                    # above 0 (1e-4): keeps the sum of the softmax near 1, see engine/loss.py
matrix_learning_rate = 0.0      # above 0: Muon for the layers' matrices with this peak, AdamW for the rest
schedule = "cosine"             # 'cosine', 'linear' or 'constant'
warmup_steps: int | None = None # None: 0.4 % of max_steps, at most 2000, at least a tenth of a short run
final_lr = 0.1                  # the last step's learning rate, as a share of the peak
weight_decay = 0.1              # on matrices and embeddings; never on the norms' gains
beta1 = 0.9                     # of AdamW
beta2 = 0.95                    # likewise
adam_eps = 1e-8                 # added to the root of the second moment; Llama 2: 1e-5
grad_clip = 1.0                 # largest joint norm of all gradients; 0: measured only
# distillation (techniques/distill.py): a larger model of the same tokenizer says what else could have stood there
teacher = ""                    # folder of a larger model of the same tokenizer, to learn from as well; empty: none
teacher_weight = 0.5            # share of the loss that is the divergence from the teacher
teacher_temperature = 2.0       # both are softened by it
teacher_attention = 0.0         # above 0: what its last layer looks at is learned too, with this weight
# looking and saving
eval_every = 250                # steps
eval_blocks = 128               # blocks of held-out text per evaluation, always the same ones
log_every = 10
log_samples = False             # keep a record of which blocks each step took
save_light = 500                # steps between light checkpoints
save_full = 250                 # steps between full ones
async_save = True               # full checkpoints are copied, and written to the disk beside the next steps
keep = 2                        # newest checkpoints of each kind that are kept; 0: all
keep_best = 1                   # light ones that are kept beyond those, for the lowest held-out loss (see eval_every)
# when things go wrong, see engine/ladder.py
max_bad_steps = 10              # so many skipped steps in a row end the run; if on_spike is 'skip' or 'rollback', send it back
on_spike = "log"                # a gradient norm that leaps: 'log' it, 'skip' the step, 'rollback' before it, or 'stop'
spike_z = 6.0                   # standard deviations above the mean of the recent norms that are a leap; 0: no matter
spike_norm = 5.0                # after the warm-up a norm above this is a leap as well; 0: no matter
spike_window = 128              # recent norms: those of so many steps
rollback_window = 16            # steps of data that are left out after a roll-back: the one that leapt and those before it
rollback_lr = 0.8               # what the learning rate is multiplied by in a roll-back
max_rollbacks = 3               # then the run ends
timeout = 60.0                  # seconds after which a process that gives no sign of life ends the run
hang_timeout = 600.0            # the same for one that lives and does not come; also the patience at the start
leave_within = 30.0             # seconds from SIGTERM or SIGUSR1 to the end of a step: then it saves and leaves, else it only leaves
log_blocks = False              # the update-to-weight ratio of each block as well
peak_flops = 0.0                # FLOP/s of one device, for the MFU; 0: from the table in engine/gauges.py
profile = ""                    # STEP:COUNT: a trace of so many steps from that one on, in out_dir/pretrain/profile
watch_nan = False               # names the module and tensor that first was not finite; slow, and without torch.compile
watch_stats = 0                 # every so many steps: mean, std and maximum of each block's output and its gradient
# the machine
device = "auto"                 # 'auto', 'cpu' or 'cuda'
dtype = "auto"                  # of matrix products: 'bf16', 'fp16' (loss scaled), 'fp32'; auto: bf16 where the machine has it
compile = True                  # torch.compile, per block
loss_chunk = 0                  # so many tokens' logits in memory at a time; 0: those of the whole micro-batch
recompute = "none"              # activations in the backward pass: 'none', 'selective' (of the MLPs) or 'full' (of whole blocks)
deterministic: bool | None = None   # same bits in every run; None: on CPU yes
threads = 0                     # 0: the cores divided by the processes on this machine
# several processes = pp * dp * tp, see engine/layout.py
parallel = "ddp"                # 'ddp': every rank holds everything; 'fsdp': states are sharded over the dp ranks
zero = 3                        # under fsdp: 1 the optimizer's states, 2 also gradients, 3 also weights
hsdp = 1                        # under fsdp: so many groups of ranks, each of which shards within itself
tp = 1                          # ranks that share each matrix
pp = 1                          # stages of layers, a micro-batch in each (1F1B)
cpu_offload = False             # under fsdp: states in the CPU's memory
# before it is run
plan = 0                        # tells memory, days, traffic and checkpoints for so many GPUs instead of training, without any
plan_gpu = "H100"               # 'A100', 'H100' or 'H200': see engine/plan.py
plan_disk = 2.0                 # GB/s to the disk of checkpoints

KINDS = ("ordinary", "eos", "bos", "first")     # of targets: text, end of page, begin of page, first token after a BOS


def open_data(config, setup):
    """Tokenizer and token shards, which must belong together; otherwise the commands that make them."""
    data = Path(config.data_dir)
    prepare, tokenize = config.command("prepare_data.py"), config.command("train_tokenizer.py")
    prepare += "" if config.files else " --inputs='CRAWL/*.warc.gz'"           # a config file says what is read
    vocabulary = find_tokenizer(data / "tokenizer")
    wanted = {vocabulary or data / "tokenizer/tokenizer.json": "tokenizer"}
    if config.data_mix is None:
        wanted[data / "tokens/index.json"] = "token shards"
    first = [] if vocabulary else [f"  {prepare} && {tokenize}      documents, then a tokenizer trained on them"]
    refuse_missing(setup, wanted, f"Make {'them' if first else 'those'} with (for archives of yours, prepare_data.py "
                   "is told --inputs='CRAWL/*.warc.gz'):", *first,
                   f"  {prepare}      {'again, now that there is' if first else 'there is'} a tokenizer: token shards")
    tokenizer = Tokenizer.load(data / "tokenizer")
    train, val = (open_mixture(config.data_dir, config.data_mix, split, config.block_size, tokenizer.hash, prepare)
                  for split in ("train", "val"))
    return tokenizer, train, val


def shape_of(config, tokenizer, source=None):
    """The model's shape: the config's, or that of the folder `source`, which a config may repeat, not contradict; but
    for a longer block with a scaling of RoPE (hf.lengthen). Blocks may be shorter than the folder's context, and its
    vocabulary larger than the tokenizer's."""
    asked = {key: getattr(config, key) for key in ModelConfig.__dataclass_fields__}
    if source is None:
        return ModelConfig(**{**asked, "vocab_size": config.vocab_size or tokenizer.vocab_size})
    theirs = replace(read_config(source), dropout=config.dropout, attention=config.attention,
                     recompute=config.recompute, separate_documents=config.separate_documents,
                     n_future=config.n_future)
    wrong = [f"{key} = {value}, but {config.init_from} has {getattr(theirs, key)}" for key, value in asked.items()
             if value not in (getattr(theirs, key), config.default(key)) and key not in ("block_size", "rope_scaling")]
    if find_tokenizer(source) and (found := Tokenizer.load(source).hash) != tokenizer.hash:
        wrong.append(f"{config.init_from} was trained with the tokenizer {found[:8]}, {config.data_dir} encoded with "
                     f"{tokenizer.hash[:8]}: the same id is another token. Encode the documents with the model's: "
                     f"put its files into {config.data_dir}/tokenizer and run {config.command('prepare_data.py')}")
    if wrong:
        refuse(*wrong, "Leave these keys out (the folder decides), or start without init_from.")
    return lengthen(theirs, config.block_size, config.rope_scaling, config.init_from)


def check(config, shape, tokenizer, train, setup):
    """Everything about the settings that can not work, at once; -> how the ranks divide the work."""
    problems = shape.problems() or inexpressible(shape)
    if shape.vocab_size < tokenizer.vocab_size:
        problems.append(f"vocab_size = {shape.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}; use "
                        "0 to take that")
    problems += [f"the training text in {source.folder} has {source.n_tokens} tokens, fewer than one block and its "
                 f"target (block_size + 1 = {config.block_size + 1}): more text, or a smaller block_size"
                 for source in train.sources if source.n_tokens <= config.block_size]
    problems += config.below_one("micro_batch_size", "max_steps", "batch_tokens", "log_every", "eval_every",
                                 "eval_blocks")
    problems += config.outside(loss_chunk=(0,), z_loss=(0,))
    problems += checkpoint.resume_problems(config.resume_from, Path(config.out_dir) / "pretrain")
    problems += optimiser_problems(config) + ladder.ladder_problems(config) + watch_problems(config)
    if config.separate_documents:
        problems += [f"separate_documents {sentence}" for sentence in shape.inseparable()]
    layout, wrong = divide(config, shape, setup.world)
    if problems + wrong:
        refuse_once(setup, *problems, *wrong)
    return layout


def load(data, blocks, config, setup):
    """This rank's share of some blocks, as micro-batches (inputs, targets, weights), each (B, T), on its device.

    Ranks that share a model need as many micro-batches each, of one size: the last ones are filled up with rows of
    weight 0."""
    equal = setup.layout and not setup.layout.plain
    size = setup.layout.micro if equal else config.micro_batch_size
    rows = -(-len(blocks) // (setup.dp * size)) * size if equal else 0
    mine = [block for share in my_share(blocks, size, setup) for block in share]
    real, mine = len(mine), mine + [blocks[0]] * max(0, rows - len(mine))
    for first in range(0, len(mine), size):
        x, y, w = batch(data, mine[first:first + size], config.block_size)
        y[max(0, real - first):], w[max(0, real - first):] = data.eos_id, 0
        yield tuple(torch.from_numpy(part).to(setup.device) for part in (x, y, w))


def sums(losses, inputs, targets, weights, tokenizer):
    """What a step adds up, in float64 so that the order of adding does not show: (9,): the weighted loss,
    then for each of KINDS the sum of its losses, then for each how many. BOS has weight 0 but is counted;
    padding is in none of them."""
    bos_id = -1 if tokenizer.bos_id is None else tokenizer.bos_id
    eos, bos, first = targets == tokenizer.eos_id, targets == bos_id, inputs == bos_id
    kinds = torch.stack([~(eos | bos | first), eos, bos, first & ~(eos | bos)])           # (4, B, T) bool
    kinds &= (weights > 0) | bos
    losses = losses.detach().double()
    return torch.cat([(losses * weights).sum()[None], (losses * kinds).sum((1, 2)), kinds.sum((1, 2)).double()])


def losses_of(model, x, y, w, config, tokenizer, setup, hidden=None, teacher=None):
    """model_losses with what the config asks for. hidden: in a stage of a pipeline, what the one before gave."""
    begins = begins_of(x, tokenizer) if config.separate_documents else None
    more = {} if hidden is None else {"hidden": hidden}
    with setup.autocast():
        if teacher:
            return teacher.losses(model, x, y, begins=begins)
        return model_losses(model, x, y, config.loss_chunk, config.z_loss, w, begins=begins, **more)


def forward_backward(model, micro_batches, config, tokenizer, setup, rows=None, scale=1.0, teacher=None):
    """Gradients of the global step's mean loss, left in the parameters; -> the step's sums over all ranks.

    Each loss is divided by the weight of the whole global step and not by its own micro-batch's: the same gradient for
    any split over micro-batches and ranks. DDP and FSDP divide by the number of ranks that share the data, hence dp.
    rows: a list that gets, of each micro-batch, the losses and the weights of its sequences, (B, 2). scale: what the
    gradients are multiplied with (fp16)."""
    total = torch.zeros(9, dtype=torch.float64, device=setup.device)
    weight = data_sum(sum(w.sum() for _, _, w in micro_batches).double(), setup).clamp(min=1)
    inner = bare(model) if setup.layout and setup.layout.pp > 1 else model

    def score(x, y, w, hidden=None):
        found = losses_of(inner, x, y, w, config, tokenizer, setup, hidden, teacher)
        if torch.is_tensor(found):
            return found                                       # a stage's hidden state, for the next one
        objectives, losses = found                             # (B, T)
        total.add_(sums(losses, x, y, w, tokenizer))
        if rows is not None:
            rows.append(torch.stack([losses.detach() * w, w], -1).double().sum(1))
        return (objectives * w).sum() * (setup.dp * scale) / weight.float()

    go_through(model, micro_batches, score)
    total = data_sum(total, setup)
    total[0] /= weight
    return total


def block_losses(rows, n, setup):
    """(n,) float64: the mean loss of each of a step's n blocks, in their order. rows: of
    forward_backward, this rank's."""
    found = torch.zeros(n, 2, dtype=torch.float64, device=setup.device)
    if rows:                                                    # as my_share deals them out; not in a first stage
        found[setup.dp_rank::setup.dp] = torch.cat(rows)
    loss, weight = data_sum(found, setup).cpu().unbind(1)
    return (loss / weight.clamp(min=1)).numpy()


def split_of(total):
    """{kind: mean loss} from a step's sums; a kind that did not occur is left out."""
    return {name: total[1 + i].item() / total[5 + i].item() for i, name in enumerate(KINDS) if total[5 + i] > 0}


def losses_of_sources(rows, blocks, data, setup):
    """{loss_of_NAME: mean loss} of each source that the global step had a block of; none where there is one source.
    rows: of forward_backward, this rank's; blocks: of the whole step. All ranks must call it."""
    if len(data.sources) == 1:
        return {}
    total = torch.zeros(len(data.sources), 2, dtype=torch.float64, device=setup.device)
    if rows:
        source = torch.from_numpy(data.source_of(blocks[setup.dp_rank::setup.dp])).to(setup.device)
        total = total.index_add(0, source, torch.cat(rows))
    total = data_sum(total, setup).tolist()
    return {f"loss_of_{name}": loss / weight for name, (loss, weight) in zip(data.names, total) if weight}


@torch.no_grad()
def evaluate(model, data, blocks, config, tokenizer, byte_counts, setup):
    """Mean loss, loss by kind, and bits per byte over fixed blocks of held-out text, divided over the ranks."""
    model.eval()
    total = torch.zeros(11, dtype=torch.float64, device=setup.device)      # `sums`; nats and bytes of the text

    def score(x, y, w, hidden=None):
        found = losses_of(bare(model), x, y, w, config, tokenizer, setup, hidden)
        if torch.is_tensor(found):
            return found
        text, losses = (w > 0) & (y != tokenizer.eos_id), found[1]
        spelled = torch.stack([losses.double()[text].sum(), byte_counts[y[text]].sum().double()])
        total.add_(torch.cat([sums(losses, x, y, w, tokenizer), spelled]))
        return losses.sum()

    go_through(model, load(data, blocks, config, setup), score, backward=False)
    model.train()
    total = data_sum(total, setup)
    counted = total[5:9].sum() - total[7]                                  # BOS is no target
    return {"loss": (total[0] / counted).item(), **{f"loss_{kind}": value for kind, value in split_of(total).items()},
            "bits_per_byte": (total[9] / math.log(2) / total[10].clamp(min=1)).item()}


def evaluate_all(model, val, config, tokenizer, byte_counts, setup):
    """`evaluate` on fixed blocks spread over each source's held-out text, eval_blocks in all. Of several sources:
    each mean is theirs, weighted with the mixture's shares (loss_eos and the like: of those sources that have any),
    and `loss_of_NAME` too."""
    each = max(1, config.eval_blocks // len(val.sources))
    scores = []
    for source, total in zip(val.sources, val.sizes):
        looked_at = min(each, total)
        blocks = [i * total // looked_at for i in range(looked_at)]
        scores.append(evaluate(model, source, blocks, config, tokenizer, byte_counts, setup))
    if len(scores) == 1:
        return scores[0]
    means = {}
    for name in dict.fromkeys(name for found in scores for name in found):
        there = [(share, found[name]) for share, found in zip(val.shares, scores) if name in found]
        means[name] = sum(share * value for share, value in there) / sum(share for share, _ in there)
    return {**means, **{f"loss_of_{name}": found["loss"] for name, found in zip(val.names, scores)}}


def show_plan(config):
    """What a run of config.plan processes needs, see engine/plan.py; without data, and without a tokenizer if the
    config says how many tokens there are."""
    from engine.plan import announce             # not needed to train
    source = find_folder(config.init_from) if config.init_from else None
    tokenizer = SimpleNamespace(vocab_size=config.vocab_size, bos_id=1, eos_id=2, hash="")
    if find_tokenizer(folder := source or Path(config.data_dir) / "tokenizer"):
        tokenizer = Tokenizer.load(folder)
    elif not config.vocab_size and not source:
        refuse(f"vocab_size = 0 is the tokenizer's, and {folder} has none: the plan needs --vocab_size=32000 or so")
    announce(config, shape_of(config, tokenizer, source), lambda config, model, micro_batches, setup: forward_backward(
        model, micro_batches, config, tokenizer, setup))


def take_up(state, train, per_step, config, setup):
    """Where the loop goes on: (step, tokens, what it remembers, its batches). state: as a full checkpoint has it."""
    past = ladder.Past(config, state, setup.dtype)
    batches = read_ahead(train, state["step"], config.max_steps, past.windows, per_step, config, setup)
    return state["step"], state["tokens"], past, batches


def main(config):
    if config.plan:
        return show_plan(config)
    setup = start(config.device, config.dtype, config.deterministic, config.threads, config.seed, config.hang_timeout)
    keep_memory(setup)
    limits = config.timeout, config.hang_timeout, config.leave_within
    with Alive(setup, *limits) as alive, Explained(config) as explained:
        pretrain(config, setup, alive, explained)


def pretrain(config, setup, alive, explained):
    # 1. Where we are, and one run per folder.
    refuse_once(setup, *config.below_one("block_size"))                     # what the data is counted in
    tokenizer, train, val = open_data(config, setup)
    source = find_folder(config.init_from) if config.init_from else None
    shape = shape_of(config, tokenizer, source)
    layout = check(config, shape, tokenizer, train, setup)
    per_step, setup = config.batch_tokens // config.block_size, join(setup, layout)
    with torch.device("meta"):
        n_params = Llama(shape).n_params()          # of all stages
    teacher, teachers_folder, wrong = distill.open_teacher(config, tokenizer, setup)
    refuse_once(setup, *wrong)
    run, lock = open_run(config, "pretrain", setup, n_params, data=f"{train.data_hash[:16]} {tokenizer.hash[:16]}",
                         **({"model": source} if source else {}), **({"teacher": teachers_folder} if teacher else {}))
    if lock is None:
        return

    # 2. The model, on its devices, with the same bits for every layout.
    model = build(lambda: Llama(shape), setup, config.seed, config.compile and not config.watch_nan)
    model.n_tokens = tokenizer.vocab_size           # where vocab_size is larger, to round it, the rest is padding
    if source:
        load_weights(model, source, put)
    watch = Watch(run, model, config, setup)
    betas = (config.beta1, config.beta2)
    optimizers = optimizers_of(model, config.learning_rate, config.matrix_learning_rate, config.weight_decay, betas,
                               config.adam_eps)
    explained.watch(shape, model, optimizers, setup)

    # 3. Continue where an earlier call stopped.
    modules, moments = {"model": model}, {"model": optimizers}
    state = ladder.go_on(run, modules, moments, setup, config, data_hash=train.data_hash)
    if state["step"] >= config.max_steps and not read_log(run):
        refuse_once(setup, f"{config.resume_from} is after step {state['step']} already, and this run ends with "
                    f"max_steps = {config.max_steps}: a larger one, or a light checkpoint as init_from, which begins "
                    "at step 0")
    if state["data_hash"] != train.data_hash:
        setup.say(f"note: {config.resume_from} was trained on other data; the order goes on at its step, but in this "
                  "data")
    model = wrapped(model, setup)

    # 4. What it will cost, before it is spent.
    warmup = warmup_length(config.max_steps, config.warmup_steps)
    flops = flops_per_token(shape, n_params, config.separate_documents)
    gauges = Gauges(run, model, optimizers, flops, config, setup)
    setup.say(f"model       {n_params:,} parameters, {shape.n_layer} layers of {shape.n_embd}, vocabulary "
              f"{shape.vocab_size:,}\nmachine     {setup.world} process(es) on {setup.device.type}, "
              f"{str(setup.dtype)[6:]}, {setup.threads} threads; {layout}\nstep        {config.batch_tokens:,} tokens "
              f"= {layout.dp} x {layout.n_micro} x {layout.micro} x {config.block_size} (ranks with data of their own, "
              f"micro-batches, sequences, tokens)\ndata        {train.describe(config.max_steps * per_step)}\n"
              f"run         {config.max_steps:,} steps, {config.max_steps * config.batch_tokens:,} tokens; "
              f"{flops * config.max_steps * config.batch_tokens:.2e} FLOPs; warm-up {warmup} steps\n"
              f"{gauges.formula}")
    byte_counts = [len(b) for b in tokenizer.token_bytes] + [0] * (shape.vocab_size - tokenizer.vocab_size)
    byte_counts = torch.tensor(byte_counts, device=setup.device)
    monitor = Monitor(run, setup, config.max_steps, state["step"], label="train")
    attempt = from_main(monitor.attempt if setup.is_main else None, setup)
    samples = open_samples(run, setup) if config.log_samples else None
    step, tokens, past, batches = take_up(state, train, per_step, config, setup)

    # 5. The loop.
    model.train()
    alive.where = watch.where
    while step < config.max_steps:
        # The batch: this rank's share of the blocks of the step.
        watch.step(step + 1)
        began = time.perf_counter()
        numbers, micro_batches = next(batches)
        loaded = time.perf_counter()
        if step == state["step"]:
            refuse_other_batch(micro_batches, config.batch_tokens, setup)

        # Forward and backward, clip, and the verdict, which is the same on every rank.
        watch.phase("forward and backward")
        rows, scale = [], past.loss_scale.value
        total = forward_backward(model, micro_batches, config, tokenizer, setup, rows, scale, teacher)
        watch.phase("optimizer")
        norm = clip(model.parameters(), config.grad_clip, setup, scale)
        loss, norm, leaving = ladder.agree(total[0], norm, alive.asked, setup)
        alive.agreed = leaving
        wrong, deed = past.judge(loss, norm, step >= warmup)

        # The step.
        logged = not deed and (wrong or (step + 1) % config.log_every == 0
                               or step in (state["step"], config.max_steps - 1))
        if logged:
            gauges.before_step()
        lr = lr_at(step, config.max_steps, config.learning_rate, warmup, config.schedule, config.final_lr)
        lr *= ladder.lr_factor(past.rollbacks, step)
        for optimizer in optimizers:
            set_lr(optimizer, lr)
            if not deed:
                optimizer.step()                    # never with a NaN: in Adam's moments it would stay
            optimizer.zero_grad(set_to_none=not layout.in_buckets)
        done, tokens, planned = step + 1, tokens + config.batch_tokens, plan_step(step, past.windows)
        seconds = time.perf_counter() - began
        gauges.step_done(loaded - began)
        watch.phase(LAST_PHASE)

        # The log.
        record, line = {}, ""
        if deed:
            record = {"loss": loss, "grad_norm": norm, "skipped": True, "wrong": wrong, "blocks": numbers,
                      "plan": planned, **watch.found()}
            line = f"{wrong}: step skipped" + f", {past.in_a_row} in a row" * (past.in_a_row > 0)
        elif logged:
            record = {"loss": loss, **{f"loss_{kind}": value for kind, value in split_of(total).items()},
                      **losses_of_sources(rows, numbers, train, setup), "lr": lr, "grad_norm": norm, "tokens": tokens,
                      **gauges.read(seconds, loaded - began, config.batch_tokens)}
            line = f"loss {loss:.4f}  lr {lr:.2e}  norm {norm:.2f}  {config.batch_tokens / seconds:,.0f} tokens/s"
            if wrong:
                record["wrong"], line = wrong, f"{line}  {wrong}"
        if done == config.max_steps or done % config.eval_every == 0:
            scores = evaluate_all(model, val, config, tokenizer, byte_counts, setup)
            record.update({f"val_{name}": value for name, value in scores.items()})
            line += f"  held-out loss {scores['loss']:.4f}, {scores['bits_per_byte']:.4f} bits per byte"
        record.update(watch.stats(scale))
        if record:
            monitor.log(done, line.strip(), **record)
        if samples:
            log_sample(samples, attempt, done, planned, numbers, setup)

        # Back to before the bad data (see engine/ladder.py), or what is to be saved, and on.
        if deed in ("rollback", "stop"):
            checkpoint.wait()
            losses = block_losses(rows, len(numbers), setup)
            on_main(lambda: ladder.decide(deed, run, step, wrong, past.in_a_row, past.rollbacks, ladder.name_documents(
                train, tokenizer, numbers, losses), config), setup)
            state = ladder.go_on(run, modules, moments, setup, config, again=True)
            batches.close()
            step, tokens, past, batches = take_up(state, train, per_step, config, setup)
            attempt += 1
            monitor.again(step, attempt)
        else:
            facts = {"tokens": tokens, **past.facts(), "config_hash": config.hash, "data_hash": train.data_hash,
                     "tokenizer_hash": tokenizer.hash, "val_loss": record.get("val_loss")}
            end_step(run, done, config.max_steps, config, modules, moments, tokenizer, facts, setup, monitor, leaving)
            monitor.advance()
            step = done
        watch.end()

    # 6. The end.
    monitor.close()
    if setup.is_main:
        final = read_log(run)[-1]       # and not local names: a run may be killed between its last step and here
        write_json(run / "result.json", {"steps": config.max_steps, "tokens": tokens, "parameters": n_params, **{
            name: value for name, value in final.items() if name == "loss" or name.startswith("val_")}})
    setup.say(f"pretrained model in {checkpoint.folder_of(run, 'light', config.max_steps)}")
    finish(setup)


if __name__ == "__main__":
    main(configure(globals()))
