"""
Every stage once, as small as it can be and still be real: to see that the chain holds, not that it learns anything.

    bash runs/demo.sh config/smoke.py
"""
data_dir = "data/smoke"
out_dir = "out/smoke"

prepare_data = dict(corpus="pydoc", corpus_modules=60)
train_tokenizer = dict(vocab_size=1024)
prepare_chat = dict(questions=600, val_questions=20, preferences=40, val_preferences=60, control_preferences=40,
                    prompts=100, val_prompts=40)

train = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_inner=192, block_size=256, batch_tokens=4096, max_steps=30,
             eval_every=15, eval_blocks=8, save_light=15, save_full=15, compile=False)
sft = dict(epochs=1, eval_every=5, save_full=5)
reward = dict(batch_size=4, along_until=0.5, sft_samples=32, max_new_tokens=32)
rlhf = dict(updates=2, episodes=16, max_new_tokens=32, eval_prompts=32, save_full=1)
evaluate = dict(text_tokens=8192, questions=5, remarks=20, continuations=4, continuation_tokens=32, max_new_tokens=32)
verdicts = False     # the targets are the demo's: so short a run can not meet them
