"""Tiers: what waits for whom when a model has more to do than it can."""

import threading

import openai
import pytest
from served import Server, line, log_of, start_batch, until

WORDS = [{"role": "user", "content": "x"}]


def test_chat_goes_before_flex_and_flex_before_a_longer_window(tmp_path):
    log = tmp_path / "calls"
    (tmp_path / "batchyard.toml").write_text(
        f"""[[tier]]
name = "soon"
window = "10m"
[[tier]]
name = "chat"
ceiling = "2s"
[[model]]
name = "echo"
engine = "echo:max_batch=1,latency=1s,log={log}"
concurrency = 1
"""
    )
    with Server(tmp_path) as server, server.client() as client:
        batch = start_batch(client, [line(f"bulk-{n}") for n in range(100)])
        until(client, batch.id, "in_progress")
        order = []

        def ask(name, **options):
            client.chat.completions.create(model="echo", messages=WORDS, **options)
            order.append(name)

        tiers = {
            "flex": {"service_tier": "flex"},
            "soon": {"extra_headers": {"x-batchyard-tier": "soon"}},
            "default": {"service_tier": "default"},
            "chat": {"extra_body": {"service_tier": "chat"}},
        }
        # A deferred one first, so that the others come while it waits.
        threads = [threading.Thread(target=ask, args=(name,), kwargs=one) for name, one in tiers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(order) == set(tiers)
        assert order.index("default") < order.index("flex")
        assert order.index("chat") < order.index("flex")
        assert order.index("soon") < order.index("flex")
        # They waited for nothing of the batch but what ran already.
        assert sum(one.startswith("bulk") for one in log_of(log)) < 5
        with pytest.raises(openai.BadRequestError) as caught:
            ask("none", extra_body={"service_tier": "none"})
        assert caught.value.param == "service_tier"
        assert "'soon'" in str(caught.value)
        client.batches.cancel(batch.id)
