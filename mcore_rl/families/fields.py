"""Reads a Hugging Face ``config.json`` so that no field goes unnoticed.

A family takes a field, demands a value of it, or ignores it as one that cannot change a number.  Of the others
``unread`` refuses those that transformers' or vLLM's code of the family reads, unless their value is known to change
nothing; those that neither reads are ``notes``.  The caller gives the default of a missing field, that of transformers'
configuration class.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, TypeVar

from mcore_rl.ground.errors import Violation

T = TypeVar("T")

# How a user leaves a field out: the key of a run, the option of a tool.
ANYWAY = (
    "If it changes nothing that you want, leave it out of what is read: "
    "model.ignore_fields=[{0}] of a run, --ignore-field {0} of a tool"
)

_IGNORED = """
_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _experts_implementation
_name_or_path architectures attn_implementation auto_map cache_implementation chunk_size_feed_forward custom_pipelines
dtype experts_implementation finetuning_task initializer_range keys_to_ignore_at_inference model_type name_or_path
output_attentions output_hidden_states return_dict task_specific_params tf_legacy_loss tokenizer_class torch_dtype
torchscript transformers.js_config transformers_version use_bfloat16 use_cache

pretraining_tp

bos_token_id decoder_start_token_id eos_token_id pad_token_id prefix sep_token_id unk_token_id

id2label label2id num_labels problem_type

aux_loss_alpha ep_size output_router_logits router_aux_loss_coef seq_aux

assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length
max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
suppress_tokens target_lookbehind temperature top_k top_p typical_p
"""
# Fields that cannot change the numbers of the forward pass, paragraph by paragraph: how the file was made and the model
# is run; what transformers declares and no code reads since version 5; ids of tokens, which we take from the tokenizer;
# labels of classifiers; terms of training, which have settings of their own here; generation, which transformers keeps
# in generation_config.json now.
IGNORED = frozenset(_IGNORED.split())

# Field -> (values that change nothing, what another would do).
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "add_cross_attention": ((False,), "adds attention to an encoder"),
    "attention_bias": ((False, None), "adds biases to the attention's projections"),
    "audio_config": ((None, {}), "adds a model of sounds"),
    "attn_logit_softcapping": ((None,), "caps the attention's scores"),
    "cross_attention_hidden_size": ((None,), "adds attention to an encoder"),
    "dual_chunk_attention_config": ((None,), "attends in another way beyond a chunk"),
    "final_logit_softcapping": ((None,), "caps the logits"),
    "is_decoder": ((False, True), "is no switch of a decoder"),
    "is_encoder_decoder": ((False,), "adds an encoder"),
    "layer_types": ((None,), "gives layers other kinds of attention"),
    "logit_scale": ((1, None), "scales the logits"),
    "mlp_bias": ((False, None), "adds biases to the MLP"),
    "partial_rotary_factor": ((1, None), "rotates a part of each head only"),
    "pruned_heads": (({}, None), "removes attention heads"),
    "qkv_bias": ((False, None), "adds biases to queries, keys and values"),
    "shared_expert_intermediate_size": ((0, None), "adds a shared expert"),
    "sliding_window": ((None,), "limits attention to a window"),
    "text_config": ((None, {}), "has the model's sizes in another place"),
    "tie_encoder_decoder": ((False,), "ties an encoder's weights"),
    "vision_config": ((None, {}), "adds a model of pictures"),
    "use_mrope": ((False, None), "rotates by positions of three axes"),
    "use_sliding_window": ((False, None), "limits attention to a window"),
}
FULL = "full_attention"  # what ``layer_types`` calls a layer without a window
# Likewise, of every field whose name ends in one of these.
DROPOUT = ("dropout", "_pdrop", "_dropout_prob", "_dropout_rate")


def neutral(name: str) -> tuple[tuple[object, ...], str] | None:
    """(values of field ``name`` that change nothing, what another would do); None if no value is known to."""
    if name.endswith(DROPOUT):
        return (0, False, None), "makes training drop values at random"
    return NEUTRAL.get(name)


def same(value: object, other: object) -> bool:
    """Equality in which ``True`` is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


class Fields:
    """The fields of one configuration, which of them were read, and the violations.

    The methods never raise on a user's mistake: they note a violation and go on with a value of the right type, so that
    all are reported at once.  sound: whether every value taken so far was the configuration's own.

    readers: the names that transformers' or vLLM's code of the family reads (``readership``); None: not known, so that
    every field counts as read.  notes: after ``unread``, the fields that nobody reads.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", readers: Set[str] | None = None) -> None:
        self.values = dict(values)
        self.notes: list[str] = []
        self._readers = readers
        self.violations: list[Violation] = []
        self.sound = True
        self._prefix = prefix
        self._read: set[str] = set()

    @property
    def taken(self) -> frozenset[str]:
        """The names that the family has read so far, there or not."""
        return frozenset(self._read)

    def take(self, name: str, kind: type[T], default: T) -> T:
        """The value of ``name``; ``default`` if it is missing.  An integer passes for a float."""
        value = self.optional(name, kind, default)
        if value is None:
            self._unsound(name, f"is null, and a model needs {_KIND[kind]} here", "Write the value of the checkpoint")
            return default
        return value

    def optional(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """As ``take``, but null is allowed and gives None."""
        self._read.add(name)
        value = self.values.get(name, default)
        if kind is float and type(value) is int:
            return kind(value)  # type: ignore[call-arg]
        if value is None or type(value) is kind:
            return value
        self._unsound(name, f"is no {_KIND[kind].split()[-1]}", f"Write {_KIND[kind]}")
        return default

    def listed(self, name: str, kind: type[T]) -> list[T] | None:
        """The values of the list ``name``; None if it is null or missing."""
        values = self.optional(name, list)
        if values is not None and any(type(value) is not kind for value in values):
            self._unsound(name, f"is no list of {_KIND[kind].split()[-1]}s", f"Write a list, each {_KIND[kind]}")
            return None
        return values

    def inside(self, name: str) -> Fields | None:
        """The fields of the mapping ``name``, to pass to ``close`` afterwards; None if it is null, empty or missing."""
        values = self.optional(name, dict)
        return Fields(values, f"{self._prefix}{name}.") if values else None

    def close(self, inner: Fields) -> None:
        """Add the violations of ``inner``, and its unread fields."""
        self.violations += [*inner.violations, *inner.unread()]
        self.sound = self.sound and inner.sound

    def demand(self, name: str, *allowed: object, because: str) -> None:
        """Refuse any value of ``name`` but the ``allowed`` ones; it may be missing.  because: what another would do."""
        self._read.add(name)
        if name in self.values and not any(same(self.values[name], value) for value in allowed):
            wanted = " or ".join(str(_json(value)) for value in allowed)
            remedy = f"This family is trained with {wanted} only; choose a checkpoint that has it"
            self.refuse(name, f"{because}, which is not supported", remedy)

    def ignore(self, *names: str) -> None:
        """Count ``names`` as read: in this family they cannot change a number."""
        self._read.update(names)

    def refuse(self, name: str, problem: str, remedy: str) -> None:
        """Note a violation of field ``name``."""
        key = f"config.json: {self._prefix}{name}"
        self.violations.append(Violation(key, _json(self.values.get(name)), problem, remedy))

    def unread(self) -> list[Violation]:
        """One violation for each field that the family did not read and that may change a number."""
        rest = Fields(self.values, self._prefix)
        for name in self.values:
            if name in self._read or (not self._prefix and name in IGNORED):
                continue
            known = None if self._prefix else neutral(name)
            if known is not None and any(same(self.values[name], value) for value in known[0]):
                continue
            if name == "layer_types" and isinstance(types := self.values[name], list) and set(types) == {FULL}:
                continue
            if self._readers is not None and name not in self._readers:
                self.notes.append(name)
            elif known is not None:
                wanted = " or ".join(str(_json(value)) for value in known[0])
                remedy = f"Choose a checkpoint with {wanted}. {ANYWAY.format(name)}"
                rest.refuse(name, f"{known[1]}, which is not supported", remedy)
            else:
                problem = "is a field that this family is not known to have, and it may change the numbers"
                rest.refuse(name, problem, ANYWAY.format(name))
        return rest.violations

    def _unsound(self, name: str, problem: str, remedy: str) -> None:
        self.sound = False
        self.refuse(name, problem, remedy)


_KIND: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}


def _json(value: object) -> object:
    """``value`` in JSON's spelling, for null, true and false."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), value)
