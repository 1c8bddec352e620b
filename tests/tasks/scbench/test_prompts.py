"""SCBench's prompts, byte for byte: what a model reads in either mode, with and without a chat template."""

from __future__ import annotations

import copy

import pytest

from kvbench.errors import UserError
from kvbench.runs.options import Request
from kvbench.runs.request import check
from kvbench.task import Mode, Split, encode

TALKS = {
    "scbench_kv": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        'JSON data:\n{"a": "1", "b": "2"}\n\n\nKey: "a"\nThe value associated with the specified key is: '
        '1\n\n\nKey: "b"\nThe value associated with the specified key is: '
    ),
    "scbench_prefix_suffix": (
        "['abc', 'xyz']\n\nWhich string starts with a and ends with c?"
        "abc\n\nWhich string starts with x and ends with z?"
    ),
    "scbench_vt": (
        "Track the variables.\n\nVAR AB = 17 VAR CD = VAR AB VAR EF = 23\n\nWhich are assigned 17?"
        "['AB', 'CD']\n\nWhich are assigned 23?"
    ),
    "scbench_repoqa": (
        "Based on the function description and code context, please retrieve and repeat the exact described function "
        "from the code context in a code block wrapped by ```:\n\n"
        "def f(x):\n    return x + 1\n\ndef g():\n    return 0\n\nIt adds one."
        "def f(x):\n    return x + 1\n\nIt gives nothing."
    ),
    "scbench_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\nAnn has a cat.\n\n"
        "Question: What does Ann have?\nAnswer:a cat\n\nQuestion: Who has {it}?\nAnswer:"
    ),
    "scbench_qa_chn": (
        "阅读以下书籍然后回答问题。\n\n安有一只猫。\n\n问题：安有什么？\n答案：猫\n\n问题：谁有猫？\n答案："  # noqa: RUF001
    ),
    "scbench_choice_eng": (
        "Read the book and answer the question.\n\nAnn has a cat.\n\n"
        "Question: What does Ann have?\nA. a dog\nB. a cat\nC. a hat\nD. a bat\n\nThe the correct answer is"
        "a cat\n\nQuestion: Who has it?\nA. Ann\nB. Bob\nC. Cid\nD. Dan\n\nThe letter of the correct answer is"
    ),
    "scbench_mf": (
        "What is the largest number of the list?\n\n[12, 5, 40]\n\n"
        "You should answer with only one number, no other words. The largest number of the list is: "
        "40\n\nWhat is the median number of the list?\n\n"
        "You should answer with only one number, no other words. The median number of the list is: "
    ),
    "scbench_many_shot": (
        "Q: 1+1? (A) 2 (B) 3\nA: A\n\nQ: 1+2?\n(A) 2\n(B) 3\nA: B\n\nQ: 2?\n(A) 2\n(B) 3\nA: "
    ),
    "scbench_summary": (
        "Paper 1: cats.\nPaper 2: dogs.\n\nSummarise paper 1.It is about cats.\n\nSummarise paper 2."
    ),
    "scbench_summary_with_needles": (
        "Paper 1: cats. The pass key is 71432.\n\nSummarise paper 1.It is about cats.\n\nWhat is the pass key?"
    ),
    "scbench_repoqa_and_kv": (
        'def f(x):\n    return x + 1\n{"a": "1"}\n\nIt adds one.def f(x):\n    return x + 1\n\nThe value of a?'
    ),
}
"""Two turns without a chat template, the first answered by the data."""
CHATS = {
    "scbench_kv": (
        "[user]Extract the value corresponding to the specified key in the JSON object below.\n\n"
        'JSON data:\n{"a": "1", "b": "2"}\n\n\nKey: "a"\nThe value associated with the specified key is: '
        '[end][assistant]1[end][user]\nKey: "b"\nThe value associated with the specified key is: [end][assistant]'
    ),
    "scbench_prefix_suffix": (
        "[user]['abc', 'xyz']\n\nWhich string starts with a and ends with c?[end][assistant]"
        "abc[end][user]Which string starts with x and ends with z?[end][assistant]"
    ),
    "scbench_vt": (
        "[user]Track the variables.\n\nVAR AB = 17 VAR CD = VAR AB VAR EF = 23\n\nWhich are assigned 17?[end]"
        "[assistant]['AB', 'CD'][end][user]Which are assigned 23?[end][assistant]"
    ),
    "scbench_repoqa": (
        "[user]Based on the function description and code context, please retrieve and repeat the exact described "
        "function from the code context in a code block wrapped by ```:\n\n"
        "def f(x):\n    return x + 1\n\ndef g():\n    return 0\n\nIt adds one.[end][assistant]"
        "def f(x):\n    return x + 1[end][user]It gives nothing.[end][assistant]"
    ),
    "scbench_qa_eng": (
        "[user]Read the book and answer the question. Be very concise in your answer.\n\nAnn has a cat.\n\n"
        "Question: What does Ann have?\nAnswer:[end][assistant]a cat[end]"
        "[user]Question: Who has {it}?\nAnswer:[end][assistant]"
    ),
    "scbench_qa_chn": (
        "[user]阅读以下书籍然后回答问题。\n\n安有一只猫。\n\n问题：安有什么？\n答案：[end][assistant]猫[end]"  # noqa: RUF001
        "[user]问题：谁有猫？\n答案：[end][assistant]"  # noqa: RUF001
    ),
    "scbench_choice_eng": (
        "[user]Read the book and answer the question.\n\nAnn has a cat.\n\n"
        "Question: What does Ann have?\nA. a dog\nB. a cat\nC. a hat\nD. a bat\n\nThe the correct answer is[end]"
        "[assistant]a cat[end]"
        "[user]Question: Who has it?\nA. Ann\nB. Bob\nC. Cid\nD. Dan\n\nThe the correct answer is[end][assistant]"
    ),
    "scbench_mf": (
        "[user]What is the largest number of the list?\n\n[12, 5, 40]\n\n"
        "You should answer with only one number, no other words. The largest number of the list is: [end]"
        "[assistant]40[end][user]What is the median number of the list?\n\n"
        "You should answer with only one number, no other words. The median number of the list is: [end][assistant]"
    ),
    "scbench_many_shot": (
        "[user]Q: 1+1? (A) 2 (B) 3\nA: A\n\nQ: 1+2?\n(A) 2\n(B) 3\nA: [end][assistant]B[end]"
        "[user]Q: 2?\n(A) 2\n(B) 3\nA: [end][assistant]"
    ),
    "scbench_summary": (
        "[user]Paper 1: cats.\nPaper 2: dogs.\n\nSummarise paper 1.[end][assistant]It is about cats.[end]"
        "[user]Summarise paper 2.[end][assistant]This paper"
    ),
    "scbench_summary_with_needles": (
        "[user]Paper 1: cats. The pass key is 71432.\n\nSummarise paper 1.[end][assistant]It is about cats.[end]"
        "[user]What is the pass key?[end][assistant]"
    ),
    "scbench_repoqa_and_kv": (
        '[user]def f(x):\n    return x + 1\n{"a": "1"}\n\nIt adds one.[end][assistant]'
        "def f(x):\n    return x + 1[end][user]The value of a?[end][assistant]"
    ),
}
"""The same with one."""
REQUESTS = {
    "scbench_kv": [
        (
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            'JSON data:\n{"a": "1", "b": "2"}'
        ),
        '\nKey: "a"\nThe value associated with the specified key is: ',
        '\nKey: "b"\nThe value associated with the specified key is: ',
    ],
    "scbench_prefix_suffix": [
        "['abc', 'xyz']", "Which string starts with a and ends with c?", "Which string starts with x and ends with z?",
    ],
    "scbench_vt": [
        "Track the variables.\n\nVAR AB = 17 VAR CD = VAR AB VAR EF = 23", "Which are assigned 17?",
        "Which are assigned 23?",
    ],
    "scbench_repoqa": [
        (
            "Based on the function description and code context, please retrieve and repeat the exact described "
            "function from the code context in a code block wrapped by ```:\n\n"
            "def f(x):\n    return x + 1\n\ndef g():\n    return 0"
        ),
        "It adds one.", "It gives nothing.",
    ],
    "scbench_qa_eng": [
        "Read the book and answer the question. Be very concise in your answer.\n\nAnn has a cat.",
        "Question: What does Ann have?\nAnswer:", "Question: Who has {it}?\nAnswer:",
    ],
    "scbench_qa_chn": [
        "阅读以下书籍然后回答问题。\n\n安有一只猫。", "问题：安有什么？\n答案：", "问题：谁有猫？\n答案：",  # noqa: RUF001
    ],
    "scbench_choice_eng": [
        "Read the book and answer the question.\n\nAnn has a cat.",
        "Question: What does Ann have?\nA. a dog\nB. a cat\nC. a hat\nD. a bat\n\nThe the correct answer is",
        "Question: Who has it?\nA. Ann\nB. Bob\nC. Cid\nD. Dan\n\nThe the correct answer is",
    ],
    "scbench_mf": [
        "You should answer with only one number, no other words. The largest number of the list is: \n\n[12, 5, 40]",
        (
            "What is the largest number of the list?\n\n"
            "You should answer with only one number, no other words. The largest number of the list is: "
        ),
        (
            "What is the median number of the list?\n\n"
            "You should answer with only one number, no other words. The median number of the list is: "
        ),
    ],
    "scbench_many_shot": [
        "Q: 1+1? (A) 2 (B) 3\nA: A", "Q: 1+2?\n(A) 2\n(B) 3\nA: ", "Q: 2?\n(A) 2\n(B) 3\nA: ",
    ],
    "scbench_summary": ["Paper 1: cats.\nPaper 2: dogs.", "Summarise paper 1.", "Summarise paper 2."],
    "scbench_summary_with_needles": [
        "Paper 1: cats. The pass key is 71432.", "Summarise paper 1.", "What is the pass key?",
    ],
    "scbench_repoqa_and_kv": ['def f(x):\n    return x + 1\n{"a": "1"}', "It adds one.", "The value of a?"],
}
"""The context and two requests, each of which follows it at once."""
each_task = pytest.mark.parametrize("name", TALKS)


def encoded(task, tokenizer, mode, turns=2):
    (example,) = task.examples(
        seed=0, split=Split.TEST, n=1, length=20_000, turns=turns, mode=mode, tokenizer=tokenizer
    )
    return encode(task, example, tokenizer)


def test_all_twelve_are_here():
    """The tables have every task, and no test passes by looking at fewer."""
    assert len(TALKS) == 12 and TALKS.keys() == CHATS.keys() == REQUESTS.keys()


@pytest.mark.parametrize(("kind", "expected"), [("mini_tokenizer", TALKS), ("chatty", CHATS)], ids=["text", "chat"])
@each_task
def test_multi_turn(name, records, task_of, kind, expected, request):
    """Two turns with reference history are the runner's text."""
    tokenizer = request.getfixturevalue(kind)
    found = encoded(task_of(name, records[name]), tokenizer, Mode.MULTI_TURN)
    one, two = found.turns
    assert tokenizer.decode(found.context + one.first + one.answer + two.later) == expected[name]


@each_task
def test_single_is_the_first_turn(name, records, task_of, mini_tokenizer):
    """One question is the first of a conversation."""
    task = task_of(name, records[name])
    single, talk = encoded(task, mini_tokenizer, Mode.SINGLE, 1), encoded(task, mini_tokenizer, Mode.MULTI_TURN)
    assert single.context == talk.context and single.turns == talk.turns[:1]


@each_task
def test_multi_request(name, records, task_of, mini_tokenizer):
    """Nothing stands between the context and a request but what the two hold."""
    found = encoded(task_of(name, records[name]), mini_tokenizer, Mode.MULTI_REQUEST)
    assert [mini_tokenizer.decode(x) for x in (found.context, *(x.first for x in found.turns))] == REQUESTS[name]


@each_task
def test_multi_request_with_a_chat_template(name, records, task_of, chatty):
    """Context and request are one message of the user."""
    found = encoded(task_of(name, records[name]), chatty, Mode.MULTI_REQUEST)
    context, *requests = REQUESTS[name]
    assert chatty.decode(found.context) == f"[user]{context}"
    assert [chatty.decode(x.first) for x in found.turns] == [f"{x}[end][assistant]" for x in requests]


def test_only_a_summary_begins_for_the_model_and_only_in_a_conversation(records, task_of, chatty):
    """`This paper` stands on follow-ups of scbench_summary with a template, on no first turn and on no request."""
    for name in TALKS:
        task = task_of(name, records[name])
        for mode in (Mode.MULTI_TURN, Mode.MULTI_REQUEST):
            (example,) = task.examples(
                seed=0, split=Split.TEST, n=1, length=20_000, turns=2, mode=mode, tokenizer=chatty
            )
            expected = ["", "This paper"] if (name, mode) == ("scbench_summary", Mode.MULTI_TURN) else ["", ""]
            assert [x.prefix for x in example.turns] == expected


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.MULTI_TURN])
@pytest.mark.parametrize("name", TALKS)
def test_a_context_says_nothing_of_its_question(task_of, records, mini_tokenizer, name, mode):
    """Asked the other way round it is the same, but where the task says that it is not."""
    record = records[name]
    task = task_of(name, record, record | {"multi_turns": record["multi_turns"][::-1]})
    one, two = task.examples(
        seed=0, split=Split.TEST, n=2, length=20_000, turns=2, mode=mode, tokenizer=mini_tokenizer
    )
    assert one.turns != two.turns
    assert (one.context == two.context) == (task.leak is None)


@pytest.mark.parametrize(
    ("task", "mode"),
    [("scbench_mf", "single"), ("scbench_mf", "multi-turn"), ("infinitebench_math_find", "single"),
     ("infinitebench_code_run", "single")],
)
def test_what_the_context_says_cannot_be_hidden(task, mode):
    """It is refused before any data are looked for, with what to do."""
    with pytest.raises(UserError, match=rf"^{task} cannot be hidden: .* ask(s|ed) for\. Leave --visibility out\.$"):
        check(Request("full", task, mode=mode, visibility="hidden"))


def test_mf_shows_its_first_question_to_multi_request():
    """As the runner does, where there is no other visibility."""
    assert check(Request("full", "scbench_mf", mode="multi-request")).protocol.visibility == "hidden"


def test_a_template_that_trims_trims_every_message(task_of, records, chatty):
    """As Llama-3's does: no white space around what a message holds, reference answers among them."""
    tokenizer = copy.deepcopy(chatty)
    tokenizer.chat_template = chatty.chat_template.replace("x.content", "x.content | trim")
    record = records["scbench_kv"]
    record["multi_turns"][0]["answer"] = " 1\n"
    task = task_of("scbench_kv", record)
    (example,) = task.examples(
        seed=0, split=Split.TEST, n=1, length=20_000, turns=2, mode=Mode.MULTI_TURN, tokenizer=tokenizer
    )
    encoded = encode(task, example, tokenizer)
    one, two = encoded.turns
    talk = [
        {"role": "user", "content": f"{example.context}{task.joint}{example.turns[0].question}"},
        {"role": "assistant", "content": example.turns[0].answer},
        {"role": "user", "content": example.turns[1].question},
    ]
    shown = tokenizer.decode(encoded.context + one.first + one.answer + two.later)
    assert shown == tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    asked = 'Key: "b"\nThe value associated with the specified key is:'
    assert shown.endswith(f"[assistant]1[end][user]{asked}[end][assistant]")
