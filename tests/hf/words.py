"""A tokenizer of 32 words, made in memory."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 32)}}
    plain = Tokenizer(WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
