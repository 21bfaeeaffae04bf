"""Every provider's adapter, behind the real SDK."""

import pytest
from fake_server import PROVIDERS, Anthropic, Chat, FakeServer, Responses
from providers import KEY, answered, model_for, request, results, said

from agent.errors import BudgetEnded, UserError
from agent.llm.conversation import Usage

each = pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.kind)


def without_sdk_retries(model):
    """The SDK's own waits between attempts cannot be shortened from the server where there is none."""
    model.client = model.client.with_options(max_retries=0)
    return model


@each
def test_parallel_calls_and_their_results_make_a_round_trip(provider):
    first = provider.answer(provider.thinking("hm"), provider.text("two looks"), provider.call("c1", "list", {"root": "stack", "path": "."}),
                            provider.call("c2", "read", {"root": "operators", "path": "x.py"}))
    with FakeServer(first, provider.answer(provider.text("done"))) as server:
        model = model_for(provider, server.url)
        one = model.ask(request(said("go")))
        assert one.end == "calls" and [(c.id, c.name, c.arguments) for c in one.calls] == [
            ("c1", "list", {"root": "stack", "path": "."}), ("c2", "read", {"root": "operators", "path": "x.py"})]
        assert "two looks" in one.text and one.usage.total == 25 - 3 * (provider is Chat)
        two = model.ask(request(said("go"), answered(one), results(("c1", "a/"), ("c2", "b")), said("note")))
        assert two.end == "end" and two.text == "done" and not two.calls
        before, after = server.bodies
    key = {"anthropic": "messages", "openai": "input", "chat": "messages"}[provider.kind]
    assert after[key][:len(before[key])] == before[key], "history is append-only"
    assert {k: v for k, v in after.items() if k != key} == {k: v for k, v in before.items() if k != key}, "nothing before the history changes"


def test_anthropic_wire_form():
    with FakeServer(Anthropic.answer(Anthropic.thinking("hm"), Anthropic.call("c1", "verify", {"level": "quick"})),
                    Anthropic.answer(Anthropic.text("done"))) as server:
        model = model_for(Anthropic, server.url, effort="high")
        one = model.ask(request(said("go")))
        model.ask(request(said("go"), answered(one), results(("c1", "bad"), error=True)))
        sent = server.seen[0]
        body = server.bodies[1]
    assert sent["path"] == "/v1/messages" and KEY in (sent["headers"].get("x-api-key", "") + sent["headers"].get("authorization", ""))
    assert one.thinking == "hm" and one.usage == Usage(input=10, output=5, cache_read=7, cache_write=3)
    assert body["system"][0]["cache_control"] == body["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert body["thinking"]["type"] == "adaptive" and body["output_config"] == {"effort": "high"}
    assert all(tool["strict"] and tool["input_schema"]["additionalProperties"] is False for tool in body["tools"])
    assert "tool_choice" not in body and "temperature" not in body and not body.get("stream")
    _, assistant, result = body["messages"]
    assert assistant["content"][0] == {"type": "thinking", "thinking": "hm", "signature": "sig"}, "signatures go back unchanged"
    assert result["content"] == [{"type": "tool_result", "tool_use_id": "c1", "content": "bad", "is_error": True}]


def test_responses_wire_form():
    with FakeServer(Responses.answer(Responses.thinking("hm"), Responses.call("c1", "verify", {"level": "quick"})),
                    Responses.answer(Responses.text("done"))) as server:
        model = model_for(Responses, server.url, effort="high")
        one = model.ask(request(said("go")))
        model.ask(request(said("go"), answered(one), results(("c1", "bad"), error=True)))
        body = server.bodies[1]
        assert server.seen[0]["path"] == "/v1/responses"
    assert one.usage == Usage(input=10, output=5, cache_read=7, cache_write=3) and one.thinking == "hm"
    assert body["store"] is False and body["include"] == ["reasoning.encrypted_content"] and body["prompt_cache_key"] == "run-7"
    assert body["reasoning"] == {"effort": "high"} and body["parallel_tool_calls"] is True and "previous_response_id" not in body
    assert all(tool["strict"] is True and tool["type"] == "function" for tool in body["tools"])
    assert [item.get("type", "said") for item in body["input"]] == ["said", "reasoning", "function_call", "function_call_output"]
    assert body["input"][1]["encrypted_content"] == "sealed" and body["input"][3]["output"] == "error: bad"


def test_chat_wire_form_has_only_what_every_server_knows():
    bad = Chat.answer(Chat.call("c1", "verify", "{\"level\": "), Chat.call("c2", "verify", "[1]"))
    with FakeServer(bad, Chat.answer(Chat.text("done"))) as server:
        model = model_for(Chat, server.url)
        one = model.ask(request(said("go")))
        assert [(c.arguments, c.raw) for c in one.calls] == [(None, "{\"level\": "), (None, "[1]")]
        model.ask(request(said("go"), answered(one), results(("c1", "bad"), ("c2", "bad"), error=True)))
        body = server.bodies[1]
        assert server.seen[0]["path"] == "/v1/chat/completions"
    assert set(body) == {"model", "messages", "tools", "max_tokens"}
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert [c["function"]["arguments"] for c in body["messages"][2]["tool_calls"]] == ["{}", "{}"], "servers parse old arguments again"
    assert "strict" not in body["tools"][0]["function"]


def test_chat_repairs_call_ids_and_guesses_missing_usage():
    with FakeServer(Chat.answer(Chat.call("", "verify", {}), Chat.call("", "localize", ""), finish="stop", usage=None)) as server:
        answer = model_for(Chat, server.url).ask(request(said("go")))
    assert [c.id for c in answer.calls] == ["call_0", "call_1"] and answer.end == "calls" and answer.calls[1].arguments == {}
    assert answer.usage.estimated and answer.usage.input > 500 and answer.usage.output > 0


@each
def test_a_cut_off_call_is_no_call_to_carry_out(provider):
    cut = provider.answer(provider.text("I will"), provider.call("c1", "patch_kernel", {} if provider is Anthropic else '{"files": [{"pa'),
                          **provider.truncated)
    with FakeServer(cut) as server:
        answer = model_for(provider, server.url).ask(request(said("go")))
    assert answer.end == "length" and not answer.items and answer.calls[0].name == "patch_kernel"


@each
def test_a_refusal_keeps_the_providers_words(provider):
    with FakeServer(provider.answer(provider.text("I"), **provider.refused)) as server:
        answer = model_for(provider, server.url).ask(request(said("go")))
    assert answer.end == "refusal" and not answer.items and answer.detail


def test_other_ways_to_refuse():
    message = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [{"type": "refusal", "refusal": "no"}]}
    failed = Responses.answer(status="failed", error={"code": "bio_policy", "message": "not this"})
    with FakeServer(Responses.answer(message), failed, Chat.answer(Chat.text(""), refusal="never")) as server:
        model = model_for(Responses, server.url)
        assert (first := model.ask(request(said("go")))).end == "refusal" and first.detail == "no"
        assert (second := model.ask(request(said("go")))).end == "refusal" and "not this" in second.detail
        assert (third := model_for(Chat, server.url).ask(request(said("go")))).end == "refusal" and third.detail == "never"


def test_a_paused_turn_is_sent_back_as_it_is():
    with FakeServer(Anthropic.answer(Anthropic.text("so far"), stop="pause_turn"), Anthropic.answer(Anthropic.text("done"))) as server:
        model = model_for(Anthropic, server.url)
        paused = model.ask(request(said("go")))
        assert paused.end == "pause"
        assert model.ask(request(said("go"), answered(paused))).end == "end"
        assert server.bodies[1]["messages"][-1] == {"role": "assistant", "content": [{"type": "text", "text": "so far"}]}


@each
def test_a_full_context_is_an_answer(provider):
    with FakeServer(provider.context_full) as server:
        answer = model_for(provider, server.url).ask(request(said("go")))
        assert answer.end == "context" and answer.detail and len(server.seen) == 1


def test_a_context_that_fills_while_answering():
    with FakeServer(Anthropic.answer(Anthropic.text("and"), stop="model_context_window_exceeded")) as server:
        assert model_for(Anthropic, server.url).ask(request(said("go"))).end == "context"


@each
@pytest.mark.parametrize("status", [429, 500, 503, 529])
def test_the_sdk_retries(provider, status):
    with FakeServer(provider.error(status, "later"), provider.error(status, "later"), provider.answer(provider.text("done"))) as server:
        assert model_for(provider, server.url).ask(request(said("go"))).text == "done"
        assert len(server.seen) == 3


@each
def test_the_outer_retry_takes_over_and_ends(provider):
    with FakeServer(*[provider.error(529, "overloaded")] * 5, provider.answer(provider.text("done"))) as server:
        assert model_for(provider, server.url).ask(request(said("go"))).text == "done"
    with FakeServer(*[provider.error(500, "broken inside")] * 9) as server:
        with pytest.raises(BudgetEnded, match=r"does not answer .*broken inside.*agent resume"):
            model_for(provider, server.url).ask(request(said("go")))
        assert len(server.seen) == 9


@each
@pytest.mark.parametrize(("status", "hint"), [(400, "boom"), (401, "check the key"), (403, "may do"), (404, "model's name")])
def test_a_request_that_no_repetition_mends_is_one_line(provider, status, hint):
    with FakeServer(provider.error(status, "boom")) as server:
        with pytest.raises(UserError, match=f"refused the request with {status}: boom") as caught:
            model_for(provider, server.url).ask(request(said("go")))
        assert len(server.seen) == 1
    assert hint in str(caught.value) and "\n" not in str(caught.value) and KEY not in str(caught.value)


@each
def test_a_server_that_does_not_answer_in_time(provider):
    with FakeServer((200, provider.answer(provider.text("done")), 0.5)) as server:
        model = without_sdk_retries(model_for(provider, server.url))
        with pytest.raises(BudgetEnded, match="did not answer in time"):
            model.ask(request(said("go"), timeout=0.1))


@each
def test_nobody_is_there(provider):
    with pytest.raises(BudgetEnded, match="does not answer"):
        without_sdk_retries(model_for(provider, "http://127.0.0.1:9")).ask(request(said("go")))


@each
def test_something_that_is_no_answer_is_tried_again(provider):
    with FakeServer((200, "<html>proxy</html>"), provider.answer(provider.text("done"))) as server:
        assert model_for(provider, server.url).ask(request(said("go"))).text == "done"


def test_a_failed_response_is_tried_again():
    failed = Responses.answer(status="failed", error={"code": "server_error", "message": "oops"})
    with FakeServer(failed, Responses.answer(Responses.text("done"))) as server:
        assert model_for(Responses, server.url).ask(request(said("go"))).text == "done"


def test_a_completion_without_a_choice_is_tried_again():
    with FakeServer({**Chat.answer(Chat.text("x")), "choices": []}, Chat.answer(Chat.text("done"))) as server:
        assert model_for(Chat, server.url).ask(request(said("go"))).text == "done"


def test_reasoning_that_nothing_follows_is_not_sent_back():
    with FakeServer(Responses.answer(Responses.thinking("hm"))) as server:
        answer = model_for(Responses, server.url).ask(request(said("go")))
    assert answer.end == "end" and answer.thinking == "hm" and not answer.items
