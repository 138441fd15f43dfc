"""The widget KV row bytes without a browser: what a config means, what the traits take, what they amount to."""
import json
import re
from pathlib import Path

import pytest

from minengine.arithmetic import GLM_5_3, kv_row, row_bytes
from minengine.config import HEAD_DTYPES, LATENT_DTYPES, ConfigError, cache_fields

traitlets = pytest.importorskip("traitlets", reason="pip install -c constraints.txt -e .[book]")
pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")

import minwidgets  # noqa: E402
from minwidgets import RowBytes  # noqa: E402
from minwidgets.modules import bundle  # noqa: E402
from minwidgets.row_bytes import LIMITS, VIEW_MIME  # noqa: E402

DEEPSEEK_V3 = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
               "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
LLAMA_8B = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
QWEN_8B = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
           "head_dim": 128, "sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 36}

# --- a config.json -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, kv_cache_dtype, row, heads, token",
    [
        (GLM_5_3, "nvfp4_fp8_ds_mla", 256 + 64 + 32, 1, 78 * 352 + 21 * 132),
        (GLM_5_3, "fp8", 576, 1, 78 * 576 + 21 * 132),
        (GLM_5_3, "bfloat16", 1152, 1, 78 * 1152 + 21 * 256),
        (DEEPSEEK_V3, "fp8_ds_mla", 512 + 4 * 4 + 2 * 64, 1, 61 * 656),
        ({**DEEPSEEK_V3, "index_head_dim": 128}, "fp8_ds_mla", 656, 1, 61 * (656 + 132)),  # as DeepSeek-V3.2: an indexer in every layer
        (LLAMA_8B, "bfloat16", 2 * 2 * 128, 8, 131_072),  # the 128 KiB a token that its users know
        (LLAMA_8B, "nvfp4", 2 * (64 + 8), 8, 32 * 8 * 144),
        (QWEN_8B, "q8_0", 2 * 4 * 34, 8, 36 * 8 * 272),
        (QWEN_8B, "q4_0", 2 * 4 * 18, 8, 36 * 8 * 144),
        ({"text_config": QWEN_8B, "vision_config": {}}, "fp8", 256, 8, 36 * 8 * 256),
        ({**LLAMA_8B, "num_key_value_heads": None}, "bfloat16", 512, 32, 524_288),
    ],
)
def test_what_a_config_leaves_in_the_cache(config, kv_cache_dtype, row, heads, token):
    found = kv_row(config, kv_cache_dtype)
    assert (found.row.total, found.heads, found.layers, found.bytes_per_token) == (row, heads, found.layers, token)


def test_indexers_may_be_listed_or_follow_from_the_rule():
    small = {**GLM_5_3, "num_hidden_layers": 5}
    assert [kv_row({**small, **how}, "fp8").indexer_layers for how in (
        {}, {"indexer_types": ["full", "shared", "shared", "full", "shared"]}, {"index_topk_pattern": "FSSSS"}, {"index_topk_freq": 0},
        {"index_skip_topk_offset": None}, {"index_head_dim": None},
    )] == [3, 2, 1, 5, 2, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": None}, "field 'num_hidden_layers' is missing"),
        ({"num_hidden_layers": 32.5}, "field 'num_hidden_layers' is 32.5; it must be a whole number of at least 1"),
        ({"num_hidden_layers": True}, "field 'num_hidden_layers' is true"),
        ({"num_key_value_heads": "8"}, "field 'num_key_value_heads' is \"8\""),
        ({"num_key_value_heads": None, "num_attention_heads": None}, "field 'num_attention_heads' is missing"),
        ({"head_dim": 0}, "field 'head_dim' is 0"),
        ({"hidden_size": None}, "field 'hidden_size' is missing"),
        ({"hidden_size": float("inf")}, "field 'hidden_size' is Infinity"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "field 'layer_types' has \"linear_attention\""),
        ({"layer_types": 3}, "field 'layer_types' has 3"),
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, "field 'sliding_window' is 4096"),
        ({"v_head_dim": 64}, "field 'v_head_dim' is 64 beside keys of 128"),
        ({"kv_lora_rank": 512}, "field 'qk_rope_head_dim' is missing"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk_freq": "4"}, "field 'index_topk_freq' is \"4\""),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "indexer_types": ["full", 3]}, "field 'indexer_types' must name"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "indexer_types": 7}, "field 'indexer_types' must name"),
    ],
)
def test_a_config_that_no_row_describes_is_refused_by_field(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        cache_fields({**LLAMA_8B, **change})


def test_a_whole_number_may_be_written_as_a_fraction():
    assert kv_row(json.loads('{"num_hidden_layers": 32.0, "num_key_value_heads": 8.0, "head_dim": 1.28e2}'), "bfloat16").bytes_per_token == 131_072


def test_an_idle_window_is_no_window():
    for idle in ({"use_sliding_window": False}, {"max_position_embeddings": 4096}):
        assert kv_row({**LLAMA_8B, "sliding_window": 4096, "max_position_embeddings": 32768, **idle}, "fp8").layers == 32


def test_formats_that_cannot_divide_the_widths_of_a_config():
    with pytest.raises(ConfigError, match="head_dim=72: kv_cache_dtype='q4_0' needs a positive multiple of 32"):
        kv_row({**LLAMA_8B, "head_dim": 72}, "q4_0")
    with pytest.raises(ConfigError, match="kv_lora_rank=500: latent rows need a positive multiple of 16"):
        kv_row({**DEEPSEEK_V3, "kv_lora_rank": 500}, "fp8")
    with pytest.raises(ConfigError, match="kv_cache_dtype='nvfp4' is not a latent row"):
        kv_row(DEEPSEEK_V3, "nvfp4")


# --- the widget --------------------------------------------------------------------------------------------


def test_the_default_is_glm_in_four_bits_and_holds_the_articles_sessions():
    widget = RowBytes()
    now = widget.numbers
    assert (widget.model_name, now.kv_row.row, now.token_bytes) == ("GLM-5.3", row_bytes("nvfp4_fp8_ds_mla"), 30_228)
    assert (now.session_bytes, now.tokens_held, now.sessions_held) == (146_000 * 30_228, 50_000_000_000 // 30_228, 11)
    widget.kv_cache_dtype = "fp8"
    assert (widget.numbers.token_bytes, widget.numbers.sessions_held) == (47_700, 7)


def test_a_widget_of_a_config():
    widget = RowBytes.from_config(LLAMA_8B, "q8_0", tokens=1000)
    assert (widget.attention, widget.model_name, widget.num_key_value_heads, widget.head_dim) == ("gqa", "LlamaForCausalLM", 8, 128)
    assert widget.numbers.session_bytes == 1000 * kv_row(LLAMA_8B, "q8_0").bytes_per_token
    glm = RowBytes.from_config(GLM_5_3, "fp8")
    assert (glm.attention, glm.num_indexer_layers, glm.numbers.token_bytes) == ("mla", 21, 47_700)


def test_other_widths_are_not_called_glm():
    assert RowBytes(kv_lora_rank=256).model_name == ""
    assert RowBytes(tokens=5).model_name == "GLM-5.3"


@pytest.mark.parametrize("name", LIMITS)
def test_counts_outside_their_limits_are_refused_by_name_and_change_nothing(name):
    least, most = LIMITS[name]
    widget = RowBytes()
    before = getattr(widget, name)
    for wrong in (least - 1, most + 1, True, "many", 1.5):
        with pytest.raises(traitlets.TraitError, match=name):
            setattr(widget, name, wrong)
        with pytest.raises(traitlets.TraitError, match=name):
            RowBytes(**{name: wrong})
    assert getattr(widget, name) == before


@pytest.mark.parametrize(
    "traits, message",
    [
        ({"kv_lora_rank": 500}, "kv_lora_rank=500: latent rows need a positive multiple of 16"),
        ({"attention": "gqa", "kv_cache_dtype": "q4_0", "head_dim": 72}, "head_dim=72: kv_cache_dtype='q4_0' needs a positive multiple of 32"),
        ({"attention": "gqa"}, "kv_cache_dtype='nvfp4_fp8_ds_mla' is not a row of grouped heads"),
        ({"num_hidden_layers": 20}, "num_indexer_layers=21: use at most num_hidden_layers, 20"),
        ({"num_layers": 20}, "unknown option 'num_layers'; known options: attention, head_dim"),
    ],
)
def test_an_authors_mistake_is_an_error_at_once(traits, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        RowBytes(**traits)


def test_unknown_choices_are_refused_by_name():
    for name in ("attention", "kv_cache_dtype"):
        with pytest.raises(traitlets.TraitError, match=name):
            RowBytes(**{name: "int5"})


def test_one_trait_at_a_time_may_pass_through_what_does_not_fit():
    widget = RowBytes()
    widget.attention = "gqa"
    with pytest.raises(ConfigError, match="grouped heads"):
        widget.numbers
    assert "grouped heads" in widget._repr_mimebundle_()[0]["text/plain"]
    widget.kv_cache_dtype = "nvfp4"
    assert widget.numbers.kv_row.row.total == 144


def test_reset_knows_the_traits_as_made():
    widget = RowBytes(tokens=7)
    widget.tokens = 8
    assert widget.initial["tokens"] == 7 and set(widget.initial) == {*LIMITS, "attention", "kv_cache_dtype", "model_name"}


def test_a_view_says_in_words_what_it_shows():
    data, metadata = RowBytes()._repr_mimebundle_()
    assert VIEW_MIME in data and metadata[VIEW_MIME]["minwidget"] == data["text/plain"]
    for text in ("352 bytes a row (latent 256, rope 64, scales 32)", "30,228 bytes a token", "11 sessions"):
        assert text in data["text/plain"]


def test_the_drawing_is_one_module_with_its_imports_in_place():
    text = bundle("row_bytes.js")
    assert not re.search(r"^import ", text, re.MULTILINE) and text.count("export default") == 1
    for name in ("numbers", "fromConfig", "rowDrawing", "render"):
        assert text.count(f"function {name}(") == 1
    assert RowBytes()._esm == text and "</script" not in text


def test_limits_and_formats_are_the_same_in_the_page():
    script = (Path(minwidgets.__file__).parent / "row_formulas.js").read_text(encoding="utf8")
    block = re.search(r"LIMITS = \{(.*?)\n\};", script, re.DOTALL)[1]
    limits = {name: (int(float(low)), int(float(high))) for name, low, high in re.findall(r"(\w+): \[([\d.e]+), ([\d.e]+)\]", block)}
    formats = {kind: tuple(json.loads(names)) for kind, names in re.findall(r"^  (mla|gqa): (\[.*\]),$", script, re.MULTILINE)}
    assert limits == LIMITS and formats == {"mla": LATENT_DTYPES, "gqa": HEAD_DTYPES}


def test_the_package_offers_its_widgets_and_nothing_else():
    assert minwidgets.__all__ == ["CopyCount", "KernelFloor", "MemoryLadder", "ParetoExplorer", "PrefillDecode", "RowBytes", "StepTimeline", "TokenMask"]
    assert minwidgets.RowBytes is RowBytes
    with pytest.raises(AttributeError, match="no attribute 'Rows'"):
        minwidgets.Rows
