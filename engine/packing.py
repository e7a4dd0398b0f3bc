"""
How the conversations of a step lie in micro-batches: one each to a row, or one behind the other.

    padded      rows of one conversation, micro_batch_size of them, as long as the longest
    buckets     the same, as many rows as make micro_tokens positions: many short ones, or few long ones
    packed      one row of up to micro_tokens positions, in which conversations stand one behind the other. Each has the
                positions 0, 1, ... and sees itself only (model.apart), so all losses are those that it would have alone

What a step consists of is planned before, for a whole epoch (`plan`). So a step is the same conversations in either
form, and its loss and gradient the same numbers but for rounding.
"""
import numpy as np
import torch

from engine.shards import begins_of, blocks_at, n_blocks, permuted, steps_by_length

BATCHINGS = ("padded", "buckets", "packed")


def rounded(width):
    """Up to a multiple of 8: with few different widths memory is reused, and tensor cores are fed."""
    return -(-width // 8) * 8


def cut(lengths, batching, rows, tokens):
    """[[places in lengths]] of the micro-batches, each place once. lengths: positions of each conversation.

    padded: in their order, `rows` at a time. Otherwise up to `tokens` positions, padding included; a conversation that
    is longer than that is alone in its micro-batch."""
    if batching == "padded":
        return [list(range(start, min(start + rows, len(lengths)))) for start in range(0, len(lengths), rows)]
    parts, room = [], []
    for place in np.argsort(-np.asarray(lengths), kind="stable").tolist():             # the longest first
        if batching == "buckets":
            if not parts or rounded(lengths[parts[-1][0]]) * (len(parts[-1]) + 1) > tokens:
                parts.append([])
            parts[-1].append(place)
            continue
        fitting = [i for i, left in enumerate(room) if lengths[place] <= left]
        best = min(fitting, key=room.__getitem__, default=len(parts))                  # where the least is left over
        if best == len(parts):
            parts.append([])
            room.append(tokens)
        parts[best].append(place)
        room[best] -= lengths[place]
    return parts


def collate(examples, numbers, pad_id):
    """Those conversations of examples [(ids, weights)] as rows: (inputs, targets, weights), each (B, T), T the longest
    one's length - 1, rounded up.

    A weight stands beside the target it belongs to. Rows are padded on the right, where a causal model sees padding
    only from positions that weigh nothing; so no mask is needed and attention keeps its fast path."""
    parts = [examples[number] for number in numbers]
    longest = rounded(max(len(ids) for ids, _ in parts) - 1) + 1
    rows = np.full((len(parts), longest), pad_id, dtype=np.int64)
    weights = np.zeros((len(parts), longest), dtype=np.float32)
    for row, (ids, of_ids) in enumerate(parts):
        rows[row, :len(ids)], weights[row, :len(ids)] = ids, of_ids
    rows, weights = torch.from_numpy(rows), torch.from_numpy(weights)
    return rows[:, :-1], rows[:, 1:], weights[:, 1:]


def pack(examples, numbers, pad_id):
    """Those conversations as one row: (inputs, targets, weights, begins), each (1, T). begins, bool: where one begins.

    Inputs and targets are joined apart, so the last token of a conversation never has to foretell the next one."""
    parts = [examples[number] for number in numbers]
    ends = np.cumsum([len(ids) - 1 for ids, _ in parts])
    padding = rounded(ends[-1]) - ends[-1]                               # one more document, which weighs nothing

    def row(pieces, fill):
        return torch.from_numpy(np.pad(np.concatenate(pieces), (0, padding), constant_values=fill))[None]
    begins = torch.zeros(1, ends[-1] + padding, dtype=torch.bool)
    begins[0, [0, *ends[:len(ends) - (padding == 0)]]] = True
    return (row([ids[:-1] for ids, _ in parts], pad_id), row([ids[1:] for ids, _ in parts], pad_id),
            row([weights[1:] for _, weights in parts], 0), begins)


def plan(lengths, sizes, counts, batch_size, window, seed, epoch):
    """The steps of one epoch, a list of arrays of row numbers: a pure function of its arguments.

    lengths: of all rows, those of the first source, then the next one's; sizes: how many rows each source has; counts:
    how many an epoch takes of it. As many as there are: each once. Otherwise it goes round at its own pace."""
    rows, first = [], 0
    for number, (size, count) in enumerate(zip(sizes, counts)):
        own = np.arange(size)
        if count != size:
            own = blocks_at(epoch * count + np.arange(count), size, f"{seed} source {number}")
        rows.append(first + own)
        first += size
    rows = np.concatenate(rows)
    return [rows[step] for step in steps_by_length(lengths[rows], batch_size, window, seed, epoch)]


def text_examples(data, tokenizer, length, weight, seed):
    """Pieces of the documents in shards, of up to length + 1 tokens, as conversations are, (ids, weights), with weight
    1 for each token. As many as weigh `weight`, or all; which ones is up to the seed."""
    examples, n = [], n_blocks(data.n_tokens, length)
    for block in permuted(np.arange(n), n, seed):
        ids = data.read_block(block, length)
        for piece in np.split(ids, begins_of(torch.from_numpy(ids)[None], tokenizer)[0].nonzero()[:, 0].numpy()):
            if len(piece) > 1 and weight > 0:
                examples.append((piece, np.ones(len(piece), dtype=np.float32)))
                weight -= len(piece) - 1
        if weight <= 0:
            break
    return examples
