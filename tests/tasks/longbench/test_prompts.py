"""LongBench v1's prompts: the card's, byte for byte, and where the question begins."""

# ruff: noqa: RUF001
from __future__ import annotations

import pytest

from kvbench.registry import find_task
from kvbench.task import Mode, Split, encode

PROMPTS = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: The text.\n\n"
        "Now, answer the question based on the story asconcisely as you can, using a single phrase if possible. Do not"
        " provide any explanation.\n\nQuestion: The input?\n\nAnswer:"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
        "single phrase or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n\nArticle: The text.\n\n"
        " Answer the question based on the above article as concisely as you can, using a single phrase or sentence if"
        ' possible. If the question cannot be answered based on the information in the article, write "unanswerable". '
        'If the question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any explanation.'
        "\n\nQuestion: The input?\n\nAnswer:"
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\nThe text.\n\n"
        "Now, answer the following question based on the above text, only give me the answer and do not output any "
        "other words.\n\nQuestion: The input?\nAnswer:"
    ),
    "multifieldqa_zh": (
        "阅读以下文字并用中文简短回答：\n\nThe text.\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：The input?\n回答："
    ),
    "hotpotqa": (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\nThe text.\n\n"
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nQuestion: The input?\nAnswer:"
    ),
    "2wikimqa": (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\nThe text.\n\n"
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nQuestion: The input?\nAnswer:"
    ),
    "musique": (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\nThe text.\n\n"
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nQuestion: The input?\nAnswer:"
    ),
    "dureader": (
        "请基于给定的文章回答下述问题。\n\n文章：The text.\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：The input?\n回答："
    ),
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\nThe text.\n\nNow, write a one-page summary of the report.\n\n"
        "Summary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\nThe text.\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: The input?\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\nThe text.\n\nNow, write a one-page summary of all the news.\n\n"
        "Summary:"
    ),
    "vcsum": "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\nThe text.\n\n会议总结：",
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "The text.\nThe input?"
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\nThe text.\n\nThe input?"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "The text.\n\nThe input?"
    ),
    "lsht": "请判断给定新闻的类别，下面是一些例子。\n\nThe text.\nThe input?",
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read"
        " these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n"
        "The text.\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format should only "
        "contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\nThe text.\n\nThe following is an abstract.\n\nThe input?\n\n"
        'Please enter the number of the paragraph that the abstract is from. The answer format must be like "Paragraph'
        ' 1", "Paragraph 2", etc.\n\nThe answer is: '
    ),
    "passage_retrieval_zh": (
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\nThe text.\n\n下面是一个摘要\n\n"
        'The input?\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：'
    ),
    "lcc": "Please complete the code given below. \nThe text.Next line of code:\n",
    "repobench-p": "Please complete the code given below. \nThe text.The input?Next line of code:\n",
}
"""Typed from the card, filled with `The text.` and `The input?`."""
MAX_NEW_TOKENS = {
    "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "multifieldqa_zh": 64, "hotpotqa": 32, "2wikimqa": 32,
    "musique": 32, "dureader": 128, "gov_report": 512, "qmsum": 512, "multi_news": 512, "vcsum": 512, "trec": 64,
    "triviaqa": 32, "samsum": 128, "lsht": 64, "passage_count": 32, "passage_retrieval_en": 32,
    "passage_retrieval_zh": 32, "lcc": 64, "repobench-p": 64,
}
BARE = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
each_task = pytest.mark.parametrize("kind", PROMPTS)


@each_task
def test_the_prompt_is_the_official_one(open_task, make, octets, line, kind):
    """The prompt is the card's text, the context ends with the record's, and max_new_tokens is the card's."""
    example = make(open_task(kind), octets)
    (turn,) = example.turns
    assert example.context + example.joint + turn.question + turn.prefix == PROMPTS[kind]
    assert example.context.endswith("The text.")
    assert (turn.max_new_tokens, turn.references) == (MAX_NEW_TOKENS[kind], tuple(line(kind)["answers"]))


def test_the_question_begins_where_the_prompt_names_it(open_task, make, octets):
    """When questions are hidden, a method sees the blank line, but neither instruction nor question."""
    questions = {
        kind: make(open_task(kind), octets).turns[0].question
        for kind in ("passage_retrieval_en", "qasper", "trec", "vcsum", "repobench-p")
    }
    assert questions["passage_retrieval_en"].startswith("The following is an abstract.\n\nThe input?\n\nPlease enter")
    assert questions["qasper"].startswith(" Answer the question based on the above article")
    assert questions["trec"] == "The input?"
    assert questions["vcsum"] == "会议总结："
    assert questions["repobench-p"] == "The input?Next line of code:\n"


@each_task
def test_tasks_of_examples_get_no_chat_template(open_task, make, chatty, kind):
    """The other fifteen do; its place is around the whole prompt."""
    task = open_task(kind)
    encoded = encode(task, make(task, chatty), chatty)
    shown = chatty.decode([*encoded.context, *encoded.turns[0].first])
    assert shown == (f"<s>{PROMPTS[kind]}" if kind in BARE else f"<user>{PROMPTS[kind]}<assistant>")


@pytest.mark.parametrize(
    ("kind", "reference"),
    [("qasper", " One"), ("lcc", "One"), ("passage_count", "Paragraph 1"), ("vcsum", "One"), ("dureader", "One")],
)
def test_the_reference_answer_goes_on_from_the_prompt(open_task, make, octets, kind, reference):
    """After a space, but not after white space or a Chinese colon."""
    assert make(open_task(kind), octets).turns[0].answer == reference


def test_samsum_stops_at_a_newline_and_is_not_empty(octets):
    """Of all tasks only this one."""
    stops = {kind: find_task(f"longbench_{kind}")().stop_ids(octets) for kind in PROMPTS}
    assert stops.pop("samsum") == {octets.convert_tokens_to_ids("Ċ")}
    assert set(stops.values()) == {frozenset()}
    assert [kind for kind in PROMPTS if find_task(f"longbench_{kind}").nonempty] == ["samsum"]


@each_task
def test_a_context_says_nothing_of_its_question(write, line, octets, kind):
    """It is the same for another question."""
    path = write("two.jsonl", *(line(kind, input=x) for x in ("The input?", "Another one?")))
    one, two = find_task(f"longbench_{kind}")(data=str(path)).examples(
        seed=0, split=Split.TEST, n=2, length=10_000, turns=1, mode=Mode.SINGLE, tokenizer=octets
    )
    assert one.context == two.context
