"""Which variables are secrets, who goes without them, and what is left of text that holds their values."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from mcore_rl.config.bounds import settings
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.generate import GenerateConfig
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.ground.secrets import (
    forget_secrets,
    is_secret,
    redact,
    redact_settings,
    redacted,
    secret_names,
    without_secrets,
)

SECRET = (
    "OPENAI_API_KEY WANDB_API_KEY API_KEY API_KEY_2 APIKEY openai_api_key SSH_PRIVATE_KEY SIGNING_KEYS "
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN GITHUB_PAT NPM_AUTH RAY_AUTH_TOKEN KAGGLE_KEY SSH_AUTH_SOCK "
    "AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN AWS_PROFILE AZURE_CLIENT_SECRET DJANGO_SECRETS "
    "MYSQL_PWD PGPASSWORD DB_PASSWORD DB_PASSWD KEY_PASSPHRASE GOOGLE_APPLICATION_CREDENTIALS SESSION_COOKIE "
)
OPEN = (
    "PATH HOME PWD OLDPWD USER LANG OMP_NUM_THREADS TOKENIZERS_PARALLELISM KEYBOARD HF_HOME WANDB_MODE "
    "PYTHONPATH RAY_ADDRESS SECRETARY AUTHOR XDG_SESSION_ID PATTERN COMPATIBLE "
)


@pytest.mark.parametrize("name", SECRET.split())
def test_names_that_hold_secrets(name: str) -> None:
    assert is_secret(name, "x")


@pytest.mark.parametrize("name", OPEN.split())
def test_names_that_do_not(name: str) -> None:
    assert not is_secret(name, "http://proxy:8080/a:b@c")


def test_a_password_in_a_url_is_one() -> None:
    environ = {
        "DATABASE_URL": "postgres://me:opensesame@host/db",
        "HTTPS_PROXY": "http://proxy:8080",
        "HF_TOKEN": "hf_1",
    }
    assert secret_names(environ) == {"DATABASE_URL", "HF_TOKEN"}
    assert without_secrets(environ=environ) == {"HTTPS_PROXY": "http://proxy:8080"}
    assert without_secrets(["HF_TOKEN", "NOT_SET"], environ).keys() == {"HTTPS_PROXY", "HF_TOKEN"}
    assert redacted("postgres://me:opensesame@host/db", environ) == "postgres://me:***@host/db"


def test_text_and_what_holds_text() -> None:
    environ = {"A_KEY": "sk-123456", "B_KEY": "sk-123456789", "C_KEY": "short", "D": "sk-no-secret", "E_KEY": ""}
    assert redacted("x sk-123456789 y sk-123456, short sk-no-secret", environ) == "x *** y ***, short sk-no-secret"
    value = {"a": ["--key=sk-123456", 3, None, ("sk-123456",)], "sk-123456": {"b": 0.5}}
    assert redact(value, environ) == {"a": ["--key=***", 3, None, ["***"]], "***": {"b": 0.5}}
    assert redact(value, {}) is value


def test_each_line_of_a_key_in_several() -> None:
    environ = {"DEPLOY_KEY": "-----BEGIN\nMIIEvQIBADAN\nBgkqhkiG9w0B\n"}
    assert redacted("of MIIEvQIBADAN", environ) == "of ***"
    assert redacted(environ["DEPLOY_KEY"], environ) == "***"


def test_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in secret_names():
        monkeypatch.delenv(name)  # and comes back
    monkeypatch.setenv("SOME_API_KEY", "sk-123456")
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    forget_secrets()
    assert "SOME_API_KEY" not in os.environ
    assert "OMP_NUM_THREADS" in os.environ


HIDDEN = "kq-7f3a91d0c5e2"


@pytest.mark.parametrize(
    "values",
    [
        {"custom_reward_function": {"reward_kwargs": {"api_key": HIDDEN}}},
        {"custom_reward_function": {"reward_kwargs": {"judge": {"OPENAI_API_KEY": HIDDEN, "answer_key": HIDDEN}}}},
        {"custom_reward_function": {"reward_kwargs": {"db": f"postgres://me:{HIDDEN}@host/db"}}},
        {"custom_reward_function": {"reward_kwargs": {"headers": {"Authorization": f"Bearer {HIDDEN}"}}}},
        {"custom_reward_function": {"reward_kwargs": {"headers": [f"Bearer {HIDDEN}"]}}},
        {"rollout": {"agent": {"program": {"url": f"http://user:{HIDDEN}@host:8000/run"}}}},
        {"rollout": {"agent": {"program": {"url": f"https://{HIDDEN}@host/run"}}}},
        {"rollout": {"agent": {"program": {"command": ["curl", "-H", f"Authorization: Bearer {HIDDEN}"]}}}},
        {"rollout": {"agent": {"program": {"command": ["curl", "-H", f"X-API-Key: {HIDDEN}"]}}}},
        {"rollout": {"agent": {"program": {"command": ["curl", "-u", f"me:{HIDDEN}"]}}}},
        {"rollout": {"agent": {"program": {"command": ["curl", f"--user=me:{HIDDEN}"]}}}},
        {"rollout": {"agent": {"program": {"command": ["solve", "--api-key", HIDDEN]}}}},
        {"rollout": {"agent": {"program": {"command": ["solve", f"--api_key={HIDDEN}"]}}}},
        {"rollout": {"agent": {"program": {"command": ["solve", "--key", HIDDEN]}}}},
        {"rollout": {"agent": {"program": {"command": ["solve", "--openai-key", HIDDEN]}}}},
        {"rollout": {"agent": {"program": {"command": ["solve", "--auth", HIDDEN]}}}},
        {"rollout": {"agent": {"program": {"command": ["curl", "-b", f"session={HIDDEN}"]}}}},
        {"custom_reward_function": {"reward_kwargs": {"bearer": HIDDEN}}},
        {"rollout": {"agent": {"program": {"command": ["env", f"OPENAI_API_KEY={HIDDEN}", "solve"]}}}},
        {"rollout": {"agent": {"program": {"command": ["sh", "-c", f"TOKEN={HIDDEN} solve --password '{HIDDEN}'"]}}}},
        {"command": ["mcore-rl", "train", f"custom_reward_function.reward_kwargs.api_key={HIDDEN}"]},
        {"command": ["mcore-rl", "train", f"custom_reward_function.reward_kwargs={{api_key:{HIDDEN}}}"]},
        {"command": ["mcore-rl", "train", f"rollout.agent.program.url=http://u:{HIDDEN}@host"]},
        {"custom_reward_function": {"reward_kwargs": {"api_keys": [HIDDEN, HIDDEN], "auth": ["me", HIDDEN]}}},
        {"custom_reward_function": {"reward_kwargs": {"api_key": {"value": HIDDEN, "of": [{"x": HIDDEN}]}}}},
        {"custom_reward_function": {"reward_kwargs": {"dsn": f"host=x password={HIDDEN} user=y"}}},
        {"rollout": {"agent": {"program": {"url": f"https://host/run?api_key={HIDDEN}"}}}},
        {"rollout": {"agent": {"program": {"url": f"https://host/run?a=b&token={HIDDEN}&c=d"}}}},
        {"reward": {"judge": {"url": f"https://host/v1?key={HIDDEN}"}}},
        {"data": {"train_files": [f"https://host/a.parquet?X-Amz-Signature={HIDDEN}"]}},
        {"rollout": {"agent": {"program": {"command": ["env", f"SERPER_KEY={HIDDEN}", "solve"]}}}},
        {"command": ["mcore-rl", "train", f"custom_reward_function.reward_kwargs.openai_key={HIDDEN}"]},
        {"command": ["mcore-rl", "train", f"custom_reward_function.reward_kwargs.judge.key={HIDDEN}"]},
        {"command": ["mcore-rl", "train", f"custom_reward_function.reward_kwargs.api_keys=[{HIDDEN},{HIDDEN}]"]},
        {"command": ["mcore-rl", "train", f"+custom_reward_function.reward_kwargs.keys=[{HIDDEN}, {HIDDEN}]"]},
        {"megatron": {"x": {"secret": HIDDEN, "list": [{"access_token": HIDDEN}], "password": 123456789}}},
    ],
)
def test_secrets_of_a_configuration_by_the_names_of_settings(values: dict[str, Any]) -> None:
    shown = json.dumps(redact_settings(values, {}))
    assert HIDDEN not in shown and "123456789" not in shown and "***" in shown


def test_what_is_no_secret_of_a_configuration_stays() -> None:
    values = {
        "data": {"prompt_key": "prompt", "max_prompt_length": 512, "reward_fn_key": "source"},
        "rollout": {"stop_token_ids": [1], "max_tokens": 5, "agent": {"program": {
            "command": ["python", "solve.py", "--max-tokens", "100", "-u", "x", "--key-column=a", "tokenizer=b",
                        "--prompt-key", "question", "-b", "16", "--key", "data/train-2024.json"],
            "url": "http://localhost:8000/a@b?page=2&max_tokens=5", "env": ["OPENAI_API_KEY"]}}},
        "reward": {"judge": {"api_key_env": "JUDGE_API_KEY"}},
        "custom_reward_function": {"reward_kwargs": {"max_tokens": 5, "pattern": "a:b@c", "threshold": 0.5}},
        "command": ["mcore-rl", "train", "data.prompt_key=question", "custom_reward_function.reward_kwargs.weight=2"],
    }  # fmt: skip
    assert redact_settings(values, {}) == values


@pytest.mark.parametrize("schema", [RunConfig, SftConfig, PreferConfig, EvaluateConfig, GenerateConfig])
def test_no_key_of_ours_has_the_name_of_a_secret(schema: Any) -> None:
    def same(values: Any, shown: Any) -> bool:
        if isinstance(values, dict):
            return all(same(value, shown[key]) for key, value in values.items())
        return bool(values == shown)

    values = {each.key.rpartition(".")[2]: "a text" for each in settings(schema)}
    assert same(values, redact_settings(values, {}))
