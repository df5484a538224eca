"""Beyond the providers' APIs: requests, results while it runs, single cancels, amend, canary, retry, priority."""

import json
from collections import Counter

import httpx
import openai
import pytest
from served import Server, ids, jsonl, line, log_of, results, start_batch, until, upload


def slow(tmp_path, *more, latency="30ms", at_once=2, fail=""):
    engine = f"echo:max_batch=1,latency={latency},log={tmp_path / 'calls'}{fail}"
    return Server(tmp_path, "--engine", engine, "--concurrency", str(at_once), *more)


def act(client, batch, name, **body):
    return client.post(f"/batches/{batch.id}/{name}", cast_to=dict, body=body)


def every_request(client, batch, **query):
    found, after = [], None
    while True:
        page = client.get(
            f"/batches/{batch.id}/requests",
            cast_to=dict,
            options={"params": query | ({"after": after} if after else {})},
        )
        found += page["data"]
        if not page["has_more"]:
            return found
        after = page["next_after"]


def until_done(client, batch, count):
    while (seen := client.batches.retrieve(batch.id)).request_counts.completed < count:
        assert seen.status in {"validating", "in_progress"}
    return seen


def test_requests_are_listed_with_their_states_before_and_after_the_end(tmp_path, place):
    with slow(tmp_path, fail=",fail=bad-*:400,fail=flaky-*:500x1") as server, server.client() as client:
        names = [f"bad-{n}" if n % 10 == 3 else f"flaky-{n}" if n % 10 == 5 else f"r-{n}" for n in range(60)]
        batch = start_batch(client, [line(one) for one in names])
        until_done(client, batch, 5)
        live = every_request(client, batch, limit=7)
        assert [one["custom_id"] for one in live] == names
        assert {one["status"] for one in live} >= {"succeeded", "queued"}
        running = every_request(client, batch, status="running")
        assert all(one["attempts"] >= 1 for one in running)
        until(client, batch.id)
        done = every_request(client, batch, limit=7)
        assert [(one["custom_id"], one["index"]) for one in done] == [(n, i) for i, n in enumerate(names)]
        by_status = Counter(one["status"] for one in done)
        assert by_status == {"succeeded": 54, "failed": 6}
        assert {one["attempts"] for one in done if one["custom_id"].startswith("flaky")} == {2}
        failed = every_request(client, batch, status="failed")
        assert {one["error"]["code"] for one in failed} == {"HTTP 400"}
        (one,) = every_request(client, batch, custom_id="flaky-25")
        assert one["index"] == 25
        assert client.get(f"/batches/{batch.id}/requests?after={done[-1]['id']}", cast_to=dict)["data"] == []
        for wrong, status in (("after=x", 404), ("limit=0", 400), ("status=odd", 400)):
            answer = httpx.get(f"{server.base_url}/batches/{batch.id}/requests?{wrong}")
            assert answer.status_code == status


def test_failures_are_grouped_while_it_runs_and_afterwards(tmp_path):
    with slow(tmp_path, latency="2ms", fail=",fail=a*:404,fail=b*:422") as server, server.client() as client:
        names = [f"{'aab'[n % 3]}{n}" for n in range(90)] + ["good"]
        batch = start_batch(client, [line(one) for one in names])
        until(client, batch.id)
        groups = client.get(f"/batches/{batch.id}/errors", cast_to=dict)["data"]
        assert [(one["code"], one["count"]) for one in groups] == [("HTTP 404", 60), ("HTTP 422", 30)]
        assert groups[0]["example_custom_id"] in names
        assert "404" in groups[0]["message"]


def read_results(client, batch, after="", limit=50):
    found = client.get(
        f"/batches/{batch.id}/results", cast_to=dict, options={"params": {"after": after, "limit": limit}}
    )
    return found["data"], found


def test_results_are_read_while_it_runs_each_once_whatever_happens(tmp_path, place):
    server = slow(tmp_path, latency="5ms", at_once=4, fail=",fail=*7:400")
    with server:
        names = [f"r{n}" for n in range(1200)]
        with server.client() as client:
            batch = start_batch(client, [line(one) for one in names])
            until_done(client, batch, 100)
            first, answer = read_results(client, batch)
            assert len(first) == 50
            assert answer["has_more"]
            assert not answer["ended"]
        server.kill()
        server.start()
        with server.client() as client:
            seen, cursor = list(first), answer["next_after"]
            while True:
                more, answer = read_results(client, batch, cursor, 170)
                seen += more
                cursor = answer["next_after"]
                if answer["ended"] and not answer["has_more"]:
                    break
            assert Counter(ids(seen)) == Counter(names)
            done, failed = results(client, until(client, batch.id))
            assert sorted(seen, key=lambda one: one["id"]) == sorted(done + failed, key=lambda one: one["id"])
            assert read_results(client, batch, cursor)[0] == []
            wrong = httpx.get(f"{server.base_url}/batches/{batch.id}/results?after=!!")
            assert wrong.status_code == 400


def events_of(response):
    name, data, last = None, None, None
    for row in response.iter_lines():
        key, _, value = row.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            data = value
        elif key == "id":
            last = value
        elif not row and name:
            yield name, json.loads(data), last
            name = None


def test_results_are_streamed_as_they_come_and_a_lost_stream_is_taken_up(tmp_path):
    with slow(tmp_path, latency="5ms", at_once=4) as server, server.client() as client:
        names = [f"r{n}" for n in range(400)]
        batch = start_batch(client, [line(one) for one in names])
        url = f"{server.base_url}/batches/{batch.id}/results?stream=true"
        seen, last, got = [], None, []
        with httpx.stream("GET", url, timeout=60) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for name, data, event_id in events_of(response):
                if name == "result":
                    got.append(data)
                    if event_id and event_id != last:
                        # What came up to here is settled; the rest will be sent again.
                        last, seen = event_id, list(got)
                if len(seen) > 100:
                    break
        kinds = Counter()
        with httpx.stream("GET", url, headers={"last-event-id": last}, timeout=60) as response:
            for name, data, _ in events_of(response):
                kinds[name] += 1
                if name == "result":
                    seen.append(data)
                elif name == "batch":
                    final = data
        assert Counter(ids(seen)) == Counter(names)
        assert kinds["end"] == 1
        assert final["status"] == "completed"


def test_single_requests_are_cancelled_and_the_others_go_on(tmp_path, place):
    with slow(tmp_path, latency="60ms") as server, server.client() as client:
        names = [f"{'keep' if n < 100 else 'drop'}-{n}" for n in range(200)]
        batch = start_batch(client, [line(one) for one in names])
        until_done(client, batch, 2)
        answer = act(client, batch, "requests/cancel", custom_id_prefix="drop-")
        assert answer["matched"] == 100
        answer = act(client, batch, "requests/cancel", custom_ids=["keep-99", "unknown"])
        assert (answer["matched"], answer["unknown"]) == (1, ["unknown"])
        batch = until(client, batch.id)
        assert batch.status == "completed"
        done, failed = results(client, batch)
        assert ids(done) == names[:99]
        assert {one["error"]["code"] for one in failed} == {"request_cancelled"}
        counts = batch.request_counts.to_dict()
        assert counts == {"total": 200, "completed": 99, "failed": 0, "never_ran": 101}
        assert set(log_of(tmp_path / "calls")) == set(names[:99])
        assert batch.saved["requests"] == 101
        assert batch.saved["tokens"] > 0
        states = Counter(one["status"] for one in every_request(client, batch))
        assert states == {"succeeded": 99, "cancelled": 101}
        with pytest.raises(openai.ConflictError):
            act(client, batch, "requests/cancel", custom_ids=["keep-1"])


def test_a_request_that_runs_is_stopped_by_its_cancel(tmp_path):
    with slow(tmp_path, latency="60s", at_once=1) as server, server.client() as client:
        batch = start_batch(client, [line("stuck")])
        while not every_request(client, batch, status="running"):
            pass
        act(client, batch, "requests/cancel", custom_ids=["stuck"])
        assert until(client, batch.id).status == "completed"


def test_what_has_not_run_is_amended_and_what_has_is_not(tmp_path, place):
    with slow(tmp_path) as server, server.client() as client:
        asked = [line(f"r{n}", f"say wrong {n}", max_tokens=1) for n in range(40)]
        batch = start_batch(client, asked)
        until_done(client, batch, 4)
        client.post(f"/batches/{batch.id}/pause", cast_to=dict)
        shown = act(
            client,
            batch,
            "amend",
            body={"max_tokens": None, "metadata": {"why": "mended"}},
            replace_text=[{"find": "wrong", "with": "right"}],
        )
        (record,) = shown["amendments"]
        assert record["change"]["replace_text"] == [{"find": "wrong", "with": "right"}]
        assert 0 < record["requests_left"] <= 36
        client.post(f"/batches/{batch.id}/resume", cast_to=dict)
        done, failed = results(client, until(client, batch.id))
        assert (len(done), failed) == (40, [])
        said = [one["response"]["body"]["choices"][0]["message"]["content"] for one in done]
        before = said.count("say")
        assert said.count("say") + sum(one.startswith("say right") for one in said) == 40
        assert 4 <= before <= 6
        for wrong, code in (
            ({}, "missing_required_parameter"),
            ({"body": {"model": "x"}}, "invalid_value"),
            ({"model": "none"}, "model_not_found"),
            ({"replace_text": [{"find": ""}]}, "string_below_min_length"),
        ):
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
                act(client, batch, "amend", **wrong)
            assert caught.value.code == code
        with pytest.raises(openai.ConflictError):
            act(client, batch, "amend", body={"seed": 1})


def test_an_amended_batch_goes_on_with_another_model(tmp_path):
    settings = tmp_path / "batchyard.toml"
    models = "".join(
        f'[[model]]\nname = "{name}"\nengine = "echo:max_batch=1,latency=40ms,log={tmp_path / name}"\n'
        "concurrency = 2\n"
        for name in ("large", "small")
    )
    settings.write_text((settings.read_text() if settings.exists() else "") + models)
    with Server(tmp_path) as server, server.client() as client:
        names = [f"r{n}" for n in range(50)]
        batch = start_batch(client, [line(one, model="large") for one in names])
        until_done(client, batch, 6)
        assert act(client, batch, "amend", model="small")["model"] == "small"
        done, failed = results(client, until(client, batch.id))
        assert (Counter(ids(done)), failed) == (Counter(names), [])
        assert len(log_of(tmp_path / "small")) >= 30
        assert len(set(log_of(tmp_path / "large"))) < 20


def test_a_canary_holds_a_bad_batch_and_lets_it_go_on_when_told(tmp_path):
    with slow(tmp_path, latency="1ms", fail=",fail=r?:400") as server, server.client() as client:
        names = [f"r{n}" for n in range(200)]
        canary = {"extra_body": {"canary": {"first": 10, "max_failed_share": 0.2}}}
        batch = start_batch(client, [line(one) for one in names], **canary)
        held = until(client, batch.id, "paused")
        assert "20%" in held.waiting_for
        assert held.request_counts.completed + held.request_counts.failed <= 10
        client.post(f"/batches/{batch.id}/resume", cast_to=dict)
        batch = until(client, batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (190, 10)
        good = start_batch(client, [line(f"g{n}") for n in range(200)], **canary)
        assert until(client, good.id).request_counts.completed == 200


def test_the_failed_are_run_again_as_a_new_batch(tmp_path):
    with slow(tmp_path, latency="1ms", fail=",fail=bad-*:400x1,fail=ugly-*:404") as server:
        with server.client() as client:
            names = [*(f"bad-{n}" for n in range(5)), *(f"ugly-{n}" for n in range(3)), "good"]
            batch = start_batch(client, [line(one) for one in names], metadata={"team": "a"})
            until(client, batch.id)
            with pytest.raises(openai.ConflictError) as caught:
                act(client, batch, "retry", kinds=["HTTP 500"])
            assert caught.value.code == "nothing_to_retry"
            again = act(client, batch, "retry")
            assert again["retry_of"] == batch.id
            assert again["metadata"] == {"team": "a"}
            again = until(client, again["id"])
            assert (again.request_counts.completed, again.request_counts.failed) == (5, 3)
            only = act(client, batch, "retry", kinds=["HTTP 404"])
            assert until(client, only["id"]).request_counts.total == 3
            client.files.delete(batch.input_file_id)
            with pytest.raises(openai.ConflictError) as caught:
                act(client, batch, "retry")
            assert "has been deleted" in str(caught.value)


def test_the_preferred_batch_goes_first_and_a_window_can_be_moved(tmp_path):
    with slow(tmp_path, latency="20ms", at_once=1) as server, server.client() as client:
        first = start_batch(client, [line(f"first-{n}") for n in range(60)], completion_window="1h")
        second = start_batch(client, [line(f"second-{n}") for n in range(20)])
        until_done(client, first, 3)
        changed = client.post(
            f"/batches/{second.id}",
            cast_to=dict,
            body={"priority": 5, "completion_window": "2h", "metadata": {"now": "first"}},
        )
        assert (changed["priority"], changed["completion_window"]) == (5, "2h")
        assert changed["expires_at"] - changed["created_at"] == 7200
        until(client, second.id)
        calls = log_of(tmp_path / "calls")
        assert "first-50" not in calls[: calls.index("second-19")]
        until(client, first.id)
        with pytest.raises(openai.ConflictError):
            client.post(f"/batches/{second.id}", cast_to=dict, body={"priority": 1})
        kept = client.post(f"/batches/{second.id}", cast_to=dict, body={"metadata": {"now": "done"}})
        assert kept["metadata"] == {"now": "done"}


def test_a_batch_of_inline_requests_needs_no_file(tmp_path):
    with Server(tmp_path, "--engine", "echo") as server, server.client() as client:
        wanted = {
            "endpoint": "/v1/chat/completions",
            "completion_window": "1h",
            "requests": [
                {
                    "custom_id": f"é{n}",
                    "body": {"model": "echo", "messages": [{"role": "user", "content": "x"}]},
                }
                for n in range(30)
            ],
        }
        made = client.post("/batches", cast_to=dict, body=wanted)
        batch = until(client, made["id"])
        assert batch.request_counts.completed == 30
        assert [one["custom_id"] for one in results(client, batch)[0]] == [f"é{n}" for n in range(30)]
        assert len(client.files.content(batch.input_file_id).text.splitlines()) == 30
        once = {"headers": {"Idempotency-Key": "mine"}}
        one, two = (client.post("/batches", cast_to=dict, body=wanted, options=once) for _ in range(2))
        assert one["id"] == two["id"]
        with pytest.raises(openai.ConflictError):
            client.post("/batches", cast_to=dict, body=wanted | {"priority": 1}, options=once)
        inputs = list(client.files.list(purpose="batch"))
        assert len(inputs) == 2
        bad = wanted | {"requests": [*wanted["requests"], {"custom_id": "é1", "body": {}}]}
        failed = until(client, client.post("/batches", cast_to=dict, body=bad)["id"])
        assert {one.line for one in failed.errors.data} == {31}
        for wrong, param in (
            ({"input_file_id": "file-x"}, "requests"),
            ({"requests": []}, "requests"),
            ({"requests": [{"custom_id": "a"}]}, "requests.0.body"),
            ({"requests": [{"custom_id": 1, "body": {}}]}, "requests.0.custom_id"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.post("/batches", cast_to=dict, body=wanted | wrong)
            assert caught.value.param == param


def test_several_models_in_one_batch_where_asked_for(tmp_path):
    (tmp_path / "batchyard.toml").write_text(
        '[[model]]\nname = "a"\nengine = "echo"\n[[model]]\nname = "b"\nengine = "echo"\n'
    )
    with Server(tmp_path) as server, server.client() as client:
        lines = [line("1", model="a"), line("2", model="b"), line("3", model="none")]
        batch = until(client, start_batch(client, lines, extra_body={"several_models": True}).id)
        done, failed = results(client, batch)
        assert [one["response"]["body"]["model"] for one in done] == ["a", "b"]
        assert failed[0]["response"]["status_code"] == 404
        assert until(client, start_batch(client, lines).id).status == "failed"


def test_batches_are_found_by_model_metadata_and_time(tmp_path, place):
    with Server(tmp_path, "--engine", "echo") as server, server.client() as client:
        made = [
            until(client, start_batch(client, [line("x")], metadata={"team": team, "a.b": "c d"}).id)
            for team in ("red", "blue", "red")
        ]

        def found(**query):
            page = client.get("/batches", cast_to=dict, options={"params": query})
            return [one["id"] for one in page["data"]]

        newest_first = [one.id for one in made][::-1]
        assert found(**{"metadata[team]": "red"}) == [newest_first[0], newest_first[2]]
        assert found(**{"metadata[team]": "blue", "metadata[a.b]": "c d"}) == [newest_first[1]]
        assert found(model="echo", status="completed", created_after=made[0].created_at) == newest_first
        assert found(model="other") == found(created_before=made[0].created_at - 1) == []
        assert httpx.get(f"{server.base_url}/batches?created_after=soon").status_code == 400


def test_a_batch_is_estimated_without_being_made(tmp_path):
    with slow(tmp_path, latency="10ms") as server, server.client() as client:
        lines = [line(f"r{n}") for n in range(100)]
        wanted = {
            "input_file_id": upload(client, lines).id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "1m",
        }

        def estimate(**more):
            return client.post("/batchyard/estimate", cast_to=dict, body=wanted | more)

        before = estimate()
        assert (before["valid"], before["requests"], before["seconds"]) == (True, 100, None)
        until(client, start_batch(client, lines[:40]).id)
        after = estimate()
        assert 0.3 < after["seconds"] < 5
        assert after["fits_window"]
        assert 1 <= after["earliest_window_seconds"] <= 5
        big = upload(client, [line(f"r{n}") for n in range(20_000)]).id
        late = estimate(input_file_id=big)
        assert (late["fits_window"], late["seconds"] > 60) == (False, True)
        assert late["earliest_window_seconds"] >= late["seconds"]
        assert after["models"][0]["requests_per_second"] > 50
        broken = estimate(input_file_id=upload(client, jsonl([line("a"), line("a")])).id)
        assert not broken["valid"]
        assert broken["errors"]["data"][0]["code"] == "duplicate_custom_id"
        assert len(list(client.batches.list())) == 1
        capacity = client.get("/batchyard/capacity", cast_to=dict)
        assert (capacity["batches"], capacity["available_tokens"]) == (0, None)
