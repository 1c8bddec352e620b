"""InfiniteBench's prompts for yarn-mistral and max_new_tokens by task (src/prompt.py and eval_utils.py at 88b3daa)."""

# ruff: noqa: RUF001
from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PROMPTS: Mapping[str, str] = MappingProxyType({
    "passkey": (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information.\n\n{context}\n\n{input}\n\nThe pass key is"
    ),
    "number_string": (
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you about the "
        "important information there.\n\n{context}\n\n{input}\n\nThe sequence of digits is"
    ),
    "kv_retrieval": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}"
    ),
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": (
        "Read the book and answer the question.\n\n{context}\n\n"
        "Question: {question}\nA. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}\n\n"
        "The letter of the correct answer is"
    ),
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {question}\nAnswer:"
    ),
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{question}\n答案：",
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": (
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:"
    ),
    "code_run": (
        "There is a function called {func} in the following Python code.\n\n{context}\n\n"
        "Please compute the exact value of {func_call}. The value of {func_call} is"
    ),
    "code_debug": (
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash.\n\n{context}\n\n"
        "Options:\nA. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}\n\nThe correct option is:"
    ),
    "longdialogue_qa_eng": (
        "Below is a dialogue script where one random occurrence of a character name is replaced with "
        '"$$MASK$$", and you should try to guess who that character is.\n\n{context}\n\n'
        "The name that has been replaced with $$MASK$$ is likely"
    ),
})
"""The filled prompt of each task, by what `suite.py` finds in a row."""

PREFIXES: Mapping[str, str] = MappingProxyType({
    "passkey": "The pass key is", "number_string": "The sequence of digits is", "kv_retrieval": "{last_line}",
    "longbook_sum_eng": "Summary:", "longbook_choice_eng": "The letter of the correct answer is",
    "longbook_qa_eng": "Answer:", "longbook_qa_chn": "答案：", "math_find": "", "math_calc": "Values:",
    "code_run": "The value of {func_call} is", "code_debug": "The correct option is:",
    "longdialogue_qa_eng": "The name that has been replaced with $$MASK$$ is likely",
})
"""The prompt's last words, from which the answer goes on.

kvpress puts such words after the assistant header too. Where its own differ (`The pass key is:`, `The return value
is:`), as its openings do, some of which are those for GPT-4, the official ones are taken.
"""

MAX_NEW_TOKENS: Mapping[str, int] = MappingProxyType({
    "passkey": 6, "number_string": 12, "kv_retrieval": 50, "longbook_sum_eng": 1200, "longbook_choice_eng": 40,
    "longbook_qa_eng": 40, "longbook_qa_chn": 40, "math_find": 3, "math_calc": 30_000, "code_run": 5, "code_debug": 5,
    "longdialogue_qa_eng": 40,
})
"""Most new tokens; kvpress allows 20 more."""
