"""A small Llama in JAX: initialisation, forward pass, and Hugging Face safetensors in and out.

Parameters are a flat dict under their Hugging Face names with weights of shape [out, in]; everything is f32 in memory
and BF16 on disk. RMSNorm, rotate-half RoPE, SwiGLU, grouped-query attention, tied embeddings.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file


@dataclass(frozen=True)
class Shape:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 32
    eps: float = 1e-5
    theta: float = 10_000.0

    def config(self, eos: int) -> dict:
        """config.json of a LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "rope_scaling": None,
            "max_position_embeddings": 512,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": eos,
            "torch_dtype": "bfloat16",
        }


def shape_from_config(config: dict) -> Shape:
    return Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        ffn=config["intermediate_size"],
        head_dim=config["head_dim"],
        eps=config["rms_norm_eps"],
        theta=config["rope_theta"],
    )


def init(shape: Shape, seed: int) -> dict:
    """Normal weights of deviation 0.02 for the embeddings and 1/sqrt(in) for the matrices; norms are ones."""
    rng = np.random.default_rng(seed)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(rows: int, cols: int, deviation: float) -> jax.Array:
        return jnp.asarray(rng.normal(0.0, deviation, (rows, cols)), jnp.float32)

    params = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden, 0.02),
        "model.norm.weight": jnp.ones(shape.hidden),
    }
    matrices = {
        "self_attn.q_proj": (q, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, q),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, cols) in matrices.items():
            scale = 1.0 / np.sqrt(2 * shape.layers) if name.endswith(("o_proj", "down_proj")) else 1.0
            params[f"{prefix}.{name}.weight"] = matrix(rows, cols, scale / np.sqrt(cols))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            params[f"{prefix}.{norm}.weight"] = jnp.ones(shape.hidden)
    return params


def is_layer_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def rope_tables(shape: Shape, length: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of shape [length, head_dim], the two halves of each row equal."""
    inverse = shape.theta ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = np.outer(np.arange(length), inverse)
    angles = np.concatenate([angles, angles], -1)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def attention(params: dict, prefix: str, shape: Shape, x: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    cos, sin = rope_tables(shape, length)

    def heads(name: str, count: int) -> jax.Array:
        y = x @ params[f"{prefix}.{name}_proj.weight"].T
        return y.reshape(batch, length, count, shape.head_dim).transpose(0, 2, 1, 3)

    q = rotate(heads("q", shape.heads), cos, sin)
    k = rotate(heads("k", shape.kv_heads), cos, sin)
    v = heads("v", shape.kv_heads)
    group = shape.heads // shape.kv_heads
    q = q.reshape(batch, shape.kv_heads, group, length, shape.head_dim)
    scores = jnp.einsum("bkgqd,bksd->bkgqs", q, k) / np.sqrt(shape.head_dim)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
    y = jnp.einsum("bkgqs,bksd->bkgqd", weights, v).reshape(batch, shape.heads, length, shape.head_dim)
    return y.transpose(0, 2, 1, 3).reshape(batch, length, -1) @ params[f"{prefix}.o_proj.weight"].T


def forward(params: dict, shape: Shape, ids: jax.Array) -> jax.Array:
    """Logits [batch, length, vocab] of token ids [batch, length]."""
    embedding = params["model.embed_tokens.weight"]
    x = embedding[ids]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        normed = rms_norm(x, params[f"{prefix}.input_layernorm.weight"], shape.eps)
        x = x + attention(params, f"{prefix}.self_attn", shape, normed)
        normed = rms_norm(x, params[f"{prefix}.post_attention_layernorm.weight"], shape.eps)
        gate = jax.nn.silu(normed @ params[f"{prefix}.mlp.gate_proj.weight"].T)
        up = normed @ params[f"{prefix}.mlp.up_proj.weight"].T
        x = x + (gate * up) @ params[f"{prefix}.mlp.down_proj.weight"].T
    return rms_norm(x, params["model.norm.weight"], shape.eps) @ embedding.T


def save_weights(params: dict, folder: Path) -> None:
    tensors = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in sorted(params.items())}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def load_model(folder: Path) -> tuple[Shape, dict]:
    """Shape and f32 parameters of a saved directory."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    return shape_from_config(config), {name: jnp.asarray(value.astype(np.float32)) for name, value in tensors.items()}
