"""Credentials are known by the name of their option and by their form, and what only looks like one is not."""

from __future__ import annotations

import pytest

from strategies.compile_errors import redact, refuse_credentials, without_credentials


def test_what_only_looks_like_a_credential_is_left_alone() -> None:
    harmless = {
        "url": "abfs://container@account.dfs.core.windows.net/x",
        "storage_options": {"endpoint_url": "http://localhost:9000/a@b", "anon": True, "use_ssl": False, "key": None},
        "task": {"pad_token": "<pad>", "caption_key": "text", "tokens": 5, "prompt": "the secret: of life"},
        "remote": "ssh://git@host/team/x",
        "password": "${oc.env:PASSWORD}",
        "proxy": "http://${oc.env:WHO}:${oc.env:PASSWORD}@host",
        "api_key": "???",
        "words": "Bearer documents, Basic training",
    }
    refuse_credentials(harmless)
    assert without_credentials(harmless) == harmless


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://me:hush@host/x: 403", "GET https://***@host/x: 403"),
        ("s3://AKIA:hu/sh+1@bucket/x", "s3://***@bucket/x"),
        ("export WANDB_API_KEY=hush && run", "export WANDB_API_KEY=*** && run"),
        ("{'secret_key': 'hu sh', 'a': 1}", "{'secret_key': '***', 'a': 1}"),
        ("Authorization: Bearer hush", "Authorization: ***"),
        ("+compile.cached.storage_options.sas=hush", "+compile.cached.storage_options.sas=***"),
        ("task.data.password=hush seed=1", "task.data.password=*** seed=1"),
        ("hf_" + "a1" * 17, "***"),
    ],
)
def test_a_text_keeps_everything_but_the_credential(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown
