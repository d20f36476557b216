"""Roles of messages: those that everybody knows, and those that the chat template names."""

from __future__ import annotations

import pytest

from mcore_rl.data.chat_template import readable
from tests.support import prompt_files

ANY = "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}"


def test_a_role_that_nobody_has_is_refused_unless_the_template_names_it() -> None:
    plain, own = prompt_files.tokenizer(ANY), prompt_files.tokenizer(ANY + "{% if false %}{{ 'wizard' }}{% endif %}")
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert readable(plain, [{"role": role, "content": "a"}]) == [{"role": role, "content": "a"}]
    with pytest.raises(ValueError, match=r"message 1 has the role 'wizard'.*Write system, developer, user"):
        readable(plain, [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}])
    assert readable(own, [{"role": "wizard", "content": "a"}])
