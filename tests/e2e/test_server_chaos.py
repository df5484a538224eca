"""Everything at once: people who pause, cancel, amend and retry while servers die and freeze. The invariants hold."""

import random
import signal
import threading
import time
from collections import Counter

import openai
import pytest
from served import ENDED, ids, line, results, start_batch, until
from test_servers_together import servers

#: What a Batch may become next; a terminal state never changes.
AFTER = {
    "validating": {
        "validating",
        "in_progress",
        "failed",
        "cancelling",
        "cancelled",
        "paused",
        "finalizing",
        "completed",
    },
    "in_progress": {"in_progress", "paused", "finalizing", "completed", "cancelling", "cancelled", "expired"},
    "paused": {"paused", "in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired"},
    "finalizing": {"finalizing", "in_progress", "paused", "completed", "expired", "cancelling", "cancelled"},
    "cancelling": {"cancelling", "cancelled"},
} | {one: {one} for one in ENDED}


class Watcher(threading.Thread):
    """Looks at Batches the whole time, and notes whatever cannot be."""

    def __init__(self, made, batch_ids):
        super().__init__()
        self.made, self.batch_ids = made, batch_ids
        self.over = threading.Event()
        self.wrong = []
        self.cancelled = set()

    def run(self):
        seen = {}
        clients = {}
        while not self.over.is_set():
            server = random.choice(self.made)
            try:
                client = clients.get(server.base_url) or server.client(timeout=2)
                clients[server.base_url] = client
                for batch_id in self.batch_ids:
                    batch = client.batches.retrieve(batch_id)
                    before = seen.get(batch_id, "validating")
                    if batch.status not in AFTER[before]:
                        self.wrong.append((batch_id, before, batch.status))
                    counts = batch.request_counts
                    if counts.completed + counts.failed + counts.never_ran > counts.total > 0:
                        self.wrong.append((batch_id, counts))
                    if batch.status in {"cancelling", "cancelled"}:
                        self.cancelled.add(batch_id)
                    seen[batch_id] = batch.status
            except openai.APIConnectionError:
                continue
            except openai.APIStatusError as error:
                if error.status_code != 503:
                    self.wrong.append(error)
        for client in clients.values():
            client.close()


def act(chance, client, batch_id):
    """Something that somebody might do."""

    def post(path, body=None):
        return client.post(f"/batches/{batch_id}{path}", cast_to=dict, body=body or {})

    number = chance.randrange(800)
    return chance.choice(
        [
            lambda: post("/pause"),
            lambda: post("/resume"),
            lambda: post("/resume"),
            lambda: post("/requests/cancel", {"custom_ids": [f"r{number}", f"r{number + 1}"]}),
            lambda: post("/amend", {"body": {"seed": number}}),
            lambda: post("", {"priority": number % 7}),
            lambda: client.get(f"/batches/{batch_id}/requests?status=running", cast_to=dict),
            lambda: client.get(f"/batches/{batch_id}/results?limit=50", cast_to=dict),
            lambda: client.get(f"/batches/{batch_id}/errors", cast_to=dict),
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_people_and_fate_do_the_invariants_hold(tmp_path, postgres, seed):
    chance = random.Random(seed)
    made = servers(tmp_path, postgres, None, 2, latency="8ms", fail=",fail=r*13:400,fail=r*5:500x1")
    names = [f"r{n}" for n in range(800)]
    with made[0], made[1]:
        with made[0].client() as client:
            batch_ids = [start_batch(client, [line(one) for one in names]).id for _ in range(4)]
        watcher = Watcher(made, batch_ids)
        watcher.start()
        refused, cancelled = 0, set()
        try:
            for turn in range(60):
                if turn % 10 == 9:
                    victim = made[turn // 10 % 2]
                    if chance.random() < 0.5:
                        victim.kill()
                        victim.start()
                    else:
                        victim.process.send_signal(signal.SIGSTOP)
                        time.sleep(1.3)  # past its lease of a second
                        victim.process.send_signal(signal.SIGCONT)
                with chance.choice(made).client(timeout=10) as client:
                    try:
                        batch_id = chance.choice(batch_ids)
                        if turn == 25:
                            client.batches.cancel(batch_ids[0])
                            cancelled.add(batch_ids[0])
                        act(chance, client, batch_id)()
                    except openai.ConflictError:
                        # What a Batch in that state does not take.
                        refused += 1
            with made[0].client() as client:
                for batch_id in batch_ids:
                    for _ in range(20):
                        status = client.batches.retrieve(batch_id).status
                        if status in ENDED:
                            break
                        if status == "paused":
                            client.post(f"/batches/{batch_id}/resume", cast_to=dict)
                        time.sleep(0.3)  # there is no signal for "not paused"
                    batch = until(client, batch_id, limit_s=90)
                    # On a slow machine it may have been over before it was cancelled.
                    assert batch.status == ("cancelled" if batch_id in cancelled else "completed")
                    done, failed = results(client, batch)
                    assert Counter(ids(done) + ids(failed)) == Counter(names)
                    counts = batch.request_counts
                    never_ran = [
                        one for one in failed if (one["error"] or {}).get("code", "").endswith("_cancelled")
                    ]
                    assert (counts.completed, counts.never_ran) == (len(done), len(never_ran))
                    assert counts.completed + counts.failed + counts.never_ran == counts.total == 800
        finally:
            watcher.over.set()
            watcher.join(timeout=30)
        assert watcher.wrong == []
        assert batch_ids[0] in watcher.cancelled
        for server in made:
            _, said = server.stop()
            assert "Traceback" not in said, said
