"""Small real models, texts and runs for tests: no network, no downloads."""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ttt_adapt.testing.commands import invoke, invoke_json
    from ttt_adapt.testing.language_models import (
        same_tensors,
        save_tiny_model,
        tiny_attention_model,
        tiny_model,
        tiny_tokenizer,
        tiny_ttt_model,
        weights_of,
    )
    from ttt_adapt.testing.library import library_documents
    from ttt_adapt.testing.practising import (
        Reward,
        own_tasks,
        practise,
        share_of_letters,
        tiny_practice,
    )
    from ttt_adapt.testing.pretraining import silent, tiny_pretraining, write_training_corpus
    from ttt_adapt.testing.tasks import imported_task, imported_tasks, write_rows
    from ttt_adapt.testing.texts import WORDS, HashedWords, sample_passages, sample_text

__all__ = [
    "WORDS",
    "HashedWords",
    "Reward",
    "imported_task",
    "imported_tasks",
    "invoke",
    "invoke_json",
    "library_documents",
    "own_tasks",
    "practise",
    "same_tensors",
    "sample_passages",
    "sample_text",
    "save_tiny_model",
    "share_of_letters",
    "silent",
    "tiny_attention_model",
    "tiny_model",
    "tiny_practice",
    "tiny_pretraining",
    "tiny_tokenizer",
    "tiny_ttt_model",
    "weights_of",
    "write_rows",
    "write_training_corpus",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".commands": ("invoke", "invoke_json"),
        ".language_models": (
            "same_tensors",
            "save_tiny_model",
            "tiny_attention_model",
            "tiny_model",
            "tiny_tokenizer",
            "tiny_ttt_model",
            "weights_of",
        ),
        ".library": ("library_documents",),
        ".practising": ("Reward", "own_tasks", "practise", "share_of_letters", "tiny_practice"),
        ".pretraining": ("silent", "tiny_pretraining", "write_training_corpus"),
        ".tasks": ("imported_task", "imported_tasks", "write_rows"),
        ".texts": ("WORDS", "HashedWords", "sample_passages", "sample_text"),
    },
)
