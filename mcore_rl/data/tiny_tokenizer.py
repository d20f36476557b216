"""A tokenizer of a few hundred tokens, trained on the texts of a tiny model.

Byte-level BPE (Sennrich et al., arXiv:1508.07909; bytes as in GPT-2), so that any text round-trips; every digit is a
token, so that the model can add column by column (Singh and Strouse, arXiv:2402.14903).  transformers and vLLM load the
directory like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
BOS = "<|begin|>"
EOS = "<|end|>"
ROLES = ("system", "user", "assistant")
NUM_BYTES = 256
MIN_VOCAB_SIZE = NUM_BYTES + 3 + len(ROLES)  # every byte, the three tokens below, and one of each role
PICTURES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # as Qwen-VL names them
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SEEING_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(
    texts: Iterable[str], directory: str | Path, vocab_size: int = 512, *, pictures: bool = False
) -> PreTrainedTokenizerFast:
    """Train on ``texts`` and save to ``directory``, with chat template and the special tokens, which are 0 to 5.

    The chat is ``<|begin|><|user|>question<|end|><|assistant|>answer<|end|>``; ``<|end|>`` is the end of a turn and of
    the sequence.  vocab_size: upper limit, at least 262; the result is smaller if ``texts`` give too few merges.
    Equal texts give an equal tokenizer.  pictures: with Qwen-VL's tokens of pictures, the next ones, and a template
    that writes them.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES)]
    assert vocab_size >= MIN_VOCAB_SIZE == NUM_BYTES + len(specials), f"vocab_size={vocab_size} holds not every byte"
    specials += PICTURES if pictures else ()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=specials[3:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = SEEING_TEMPLATE if pictures else CHAT_TEMPLATE
    wrapped.save_pretrained(directory)
    return wrapped
