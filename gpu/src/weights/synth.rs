//! Models of real shapes with random weights, as GGUF files: for speed, where what they write does not matter.
//! Owner: `tokenrouter synth-model`. Invariant: the same shape, format and seed give the same bytes; a file that exists is
//! never written over; one that could not be finished is removed.
//!
//! Weights have mean 0 and the variance that keeps activations of order 1 (1 / columns; the two matrices that write into
//! the residual stream divided by 2 layers more, as in GPT-2), so that logits are finite. Shapes: the `config.json` files
//! that Qwen publishes with Qwen3.

use super::error::{Result, WeightsError};
use half::f16;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use tokenrouter_core::rng::mix;
use tokenrouter_kernels::quant::Format;

/// Alignment of tensor data, bytes.
const ALIGNMENT: u64 = 32;
/// Spread of the logits.
const LOGIT_DEVIATION: f32 = 2.0;
/// Control tokens, after the 256 bytes.
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// `tokenizer.ggml.token_type` of a normal, a control and an unused token.
const KINDS: [i32; 3] = [1, 3, 5];
/// ChatML, as Qwen's models use it.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + \
'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Sizes of a Qwen3 model with a tied head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Inner width of the feed-forward part.
    pub ffn: usize,
    /// Rows of the embedding; tokens are fewer.
    pub vocab: usize,
    /// Longest sequence.
    pub context: usize,
}

impl Shape {
    /// Qwen3-0.6B.
    pub const QWEN3_0_6B: Shape = Shape {
        hidden: 1024,
        layers: 28,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        ffn: 3072,
        vocab: 151_936,
        context: 40_960,
    };
    /// Qwen3-1.7B.
    pub const QWEN3_1_7B: Shape = Shape { hidden: 2048, ffn: 6144, ..Shape::QWEN3_0_6B };
    /// Qwen3-4B.
    pub const QWEN3_4B: Shape = Shape { hidden: 2560, layers: 36, heads: 32, ffn: 9728, ..Shape::QWEN3_0_6B };
}

/// A model to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synth {
    /// Its sizes; widths of rows must be whole blocks of the format.
    pub shape: Shape,
    /// Format of all matrices: [`Format::Q8_0`] or [`Format::Q4_0`].
    pub format: Format,
    /// What the weights are drawn from.
    pub seed: u64,
}

/// A matrix with the deviation of its values, or a vector of ones.
struct Part {
    name: String,
    rows: usize,
    cols: usize,
    deviation: Option<f32>,
}

impl Synth {
    /// Bytes of all tensors.
    ///
    /// # Errors
    /// As [`Synth::write`], for sizes that make no tensor.
    pub fn bytes(&self) -> Result<u64> {
        self.parts().iter().map(|part| self.part_bytes(part)).sum()
    }

    /// Writes the file; `progress` is told the bytes of tensors written so far.
    ///
    /// # Errors
    /// [`WeightsError`] for a file that exists or cannot be written, for rows that are not whole blocks, and for other
    /// formats.
    pub fn write(&self, path: &Path, progress: &mut dyn FnMut(u64)) -> Result<()> {
        if !matches!(self.format, Format::Q8_0 | Format::Q4_0) {
            let reason = format!("{} is not written; Q8_0 and Q4_0 are", self.format.name());
            return Err(WeightsError::invalid(path, "format", reason));
        }
        let head = self.head()?;
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        let file = file.map_err(|reason| WeightsError::io(path, reason))?;
        self.body(file, &head, progress).map_err(|reason| {
            // Half a model is of no use; that it could not be written is the error to report.
            let _ = std::fs::remove_file(path);
            WeightsError::io(path, reason)
        })
    }

    fn body(&self, file: File, head: &[u8], progress: &mut dyn FnMut(u64)) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(head)?;
        let (mut at, mut told) = (head.len() as u64, 0);
        for (index, part) in (0u64..).zip(self.parts()) {
            let gap = at.next_multiple_of(ALIGNMENT) - at;
            out.write_all(&[0; ALIGNMENT as usize][..gap as usize])?;
            let mut written = 0u64;
            let mut block = [0u8; 34];
            match part.deviation {
                None => {
                    for _ in 0..part.cols {
                        out.write_all(&1f32.to_le_bytes())?;
                    }
                    written += 4 * part.cols as u64;
                }
                Some(deviation) => {
                    let size = self.format.block_bytes();
                    let mut draws = Draws(mix(mix(self.seed).wrapping_add(index)));
                    for _ in 0..part.rows * part.cols / self.format.block_values() {
                        fill(&mut block[..size], (self.format, deviation), &mut draws);
                        out.write_all(&block[..size])?;
                        written += size as u64;
                    }
                }
            }
            at += gap + written;
            told += written;
            progress(told);
        }
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    }

    fn parts(&self) -> Vec<Part> {
        let Shape { hidden, layers, heads, kv_heads, head_dim, ffn, vocab, .. } = self.shape;
        let matrix = |name: String, rows: usize, cols: usize, scale: f32| Part {
            name,
            rows,
            cols,
            deviation: Some(scale / (cols as f32).sqrt()),
        };
        let ones = |name: String, cols: usize| Part { name, rows: 1, cols, deviation: None };
        let into_residual = 1.0 / (2.0 * layers as f32).sqrt();
        let mut parts = vec![
            matrix("token_embd.weight".into(), vocab, hidden, LOGIT_DEVIATION),
            ones("output_norm.weight".into(), hidden),
        ];
        for layer in 0..layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            parts.extend([
                ones(name("attn_norm"), hidden),
                matrix(name("attn_q"), heads * head_dim, hidden, 1.0),
                matrix(name("attn_k"), kv_heads * head_dim, hidden, 1.0),
                matrix(name("attn_v"), kv_heads * head_dim, hidden, 1.0),
                matrix(name("attn_output"), hidden, heads * head_dim, into_residual),
                ones(name("attn_q_norm"), head_dim),
                ones(name("attn_k_norm"), head_dim),
                ones(name("ffn_norm"), hidden),
                matrix(name("ffn_gate"), ffn, hidden, 1.0),
                matrix(name("ffn_up"), ffn, hidden, 1.0),
                matrix(name("ffn_down"), hidden, ffn, into_residual),
            ]);
        }
        parts
    }

    fn part_bytes(&self, part: &Part) -> Result<u64> {
        let format = if part.deviation.is_some() { self.format } else { Format::F32 };
        let bytes = format.tensor_bytes(part.rows, part.cols);
        let what = format!("tensor {:?}", part.name);
        bytes.map(|bytes| bytes as u64).map_err(|reason| WeightsError::invalid(Path::new(""), what, reason.to_string()))
    }

    /// Header, metadata and tensor table.
    fn head(&self) -> Result<Vec<u8>> {
        let parts = self.parts();
        let metadata = self.metadata();
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((parts.len() as u64).to_le_bytes());
        out.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in &metadata {
            text(&mut out, key);
            out.extend(value);
        }
        let number = if self.format == Format::Q8_0 { 8u32 } else { 2 };
        let mut offset = 0u64;
        for part in &parts {
            text(&mut out, &part.name);
            let is_matrix = part.deviation.is_some();
            let dims: &[usize] = if is_matrix { &[part.cols, part.rows] } else { &[part.cols] };
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|&dim| out.extend((dim as u64).to_le_bytes()));
            out.extend(if is_matrix { number } else { 0 }.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += self.part_bytes(part)?.next_multiple_of(ALIGNMENT);
        }
        Ok(out)
    }

    fn metadata(&self) -> Vec<(String, Vec<u8>)> {
        let Shape { hidden, layers, heads, kv_heads, head_dim, ffn, vocab, context } = self.shape;
        let mut all = vec![("general.architecture".to_owned(), typed_text("qwen3"))];
        let mut number = |key: &str, value: usize| all.push((key.to_owned(), typed(4, &(value as u32).to_le_bytes())));
        for (key, value) in [
            ("embedding_length", hidden),
            ("block_count", layers),
            ("attention.head_count", heads),
            ("attention.head_count_kv", kv_heads),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
            ("feed_forward_length", ffn),
            ("context_length", context),
        ] {
            number(&format!("qwen3.{key}"), value);
        }
        number("tokenizer.ggml.eos_token_id", 256);
        let float = |value: f32| typed(6, &value.to_le_bytes());
        all.push(("qwen3.rope.freq_base".into(), float(1e6)));
        all.push(("qwen3.attention.layer_norm_rms_epsilon".into(), float(1e-6)));
        let mut tokens: Vec<String> = (0..=255u8).map(|byte| shown(byte).to_string()).collect();
        tokens.extend(CONTROL.iter().map(|name| (*name).to_owned()));
        let real = tokens.len();
        // Other readers want a text for each row of the embedding.
        tokens.extend((real..vocab).map(|id| format!("[PAD{id}]")));
        let [normal, control, unused] = KINDS;
        let kind = |id| {
            if id < 256 {
                normal
            } else if id < real {
                control
            } else {
                unused
            }
        };
        let kinds: Vec<u8> = (0..tokens.len()).flat_map(|id| kind(id).to_le_bytes()).collect();
        let mut texts = Vec::new();
        tokens.iter().for_each(|token| text(&mut texts, token));
        let list = |kind: u32, count: usize, bytes: &[u8]| {
            typed(9, &[&kind.to_le_bytes()[..], &(count as u64).to_le_bytes(), bytes].concat())
        };
        all.push(("tokenizer.ggml.tokens".into(), list(8, tokens.len(), &texts)));
        all.push(("tokenizer.ggml.token_type".into(), list(5, tokens.len(), &kinds)));
        all.push(("tokenizer.ggml.merges".into(), list(8, 0, &[])));
        for (key, value) in [
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "qwen2"),
            ("tokenizer.chat_template", CHAT_TEMPLATE),
        ] {
            all.push((key.to_owned(), typed_text(value)));
        }
        all
    }
}

/// A value of metadata with its type number.
fn typed(kind: u32, bytes: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], bytes].concat()
}

fn typed_text(value: &str) -> Vec<u8> {
    let mut out = typed(8, &[]);
    text(&mut out, value);
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The character that stands for a byte in byte-level vocabularies (GPT-2): itself where it is printable, otherwise the
/// next of those from 256.
fn shown(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_printable(other)).count() as u32;
    char::from_u32(256 + before).unwrap_or('?')
}

/// Random words, eight bytes at a time.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> [u8; 8] {
        self.0 = self.0.wrapping_add(1);
        mix(self.0).to_le_bytes()
    }
}

/// A block of 32 values: uniform codes from -n to n, 0 twice as often, under the scale that gives the deviation.
fn fill(block: &mut [u8], (format, deviation): (Format, f32), draws: &mut Draws) {
    let n = if format == Format::Q8_0 { 127.0f32 } else { 7.0 };
    let scale = deviation / (n * (2.0 * n + 1.0) / 6.0).sqrt();
    block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    // A nibble stands for itself - 8. The code without an opposite becomes 0.
    let nibble = |code: u8| if code == 0 { 8 } else { code };
    for eight in block[2..].chunks_mut(8) {
        for (byte, draw) in eight.iter_mut().zip(draws.next()) {
            *byte = match format {
                Format::Q8_0 if draw == 0x80 => 0,
                Format::Q8_0 => draw,
                _ => nibble(draw & 0x0f) | nibble(draw >> 4) << 4,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Scratch;
    use super::*;
    use crate::load::{KvMemory, LoadOptions, load};
    use std::sync::Arc;
    use tokenrouter_core::executor::{Draw, Executor, Needs, Row, RowOutput, Step};
    use tokenrouter_core::ids::RequestId;
    use tokenrouter_kernels::quant::dequantize_row;

    const TINY: Shape =
        Shape { hidden: 64, layers: 2, heads: 4, kv_heads: 2, head_dim: 32, ffn: 96, vocab: 320, context: 128 };

    #[test]
    fn files_load_step_and_repeat() {
        let folder = Scratch::new();
        for (at, format) in [Format::Q8_0, Format::Q4_0].into_iter().enumerate() {
            let synth = Synth { shape: TINY, format, seed: 5 };
            let path = folder.path().join(format!("{at}.gguf"));
            let mut told = 0;
            synth.write(&path, &mut |bytes| told = bytes).unwrap();
            assert_eq!(told, synth.bytes().unwrap());
            let found = super::super::inspect(&path).unwrap();
            assert_eq!((found.tokens.len, found.config.vocab, found.weight_bytes), (259, 320, told));
            let options = LoadOptions { kv: KvMemory::Pages(8), threads: 1, ..LoadOptions::default() };
            let mut runner = load(&path, &options, &mut |_| ()).unwrap().executor().unwrap();
            let draw = Draw {
                params: Arc::default(),
                history: None,
                banned: Arc::from([]),
                mask: None,
                needs: Needs { top_k: 4, entropy: true, ..Needs::default() },
                logprobs: None,
            };
            let row = Row {
                request: RequestId(1),
                start: 0,
                tokens: (0..40).collect(),
                pages: vec![0, 1, 2],
                draw: Some(draw),
                targets: None,
            };
            let output = runner.step(&Step { rows: vec![row] }).unwrap();
            let RowOutput::Drawn(drawn) = &output.rows[0] else { panic!("{output:?}") };
            assert!(drawn.signals.top.iter().all(|(_, logit)| logit.is_finite() && logit.abs() < 20.0), "{drawn:?}");
            let again = folder.path().join(format!("{at}-again.gguf"));
            synth.write(&again, &mut |_| ()).unwrap();
            assert!(std::fs::read(&path).unwrap() == std::fs::read(&again).unwrap());
            let other = folder.path().join(format!("{at}-other.gguf"));
            Synth { seed: 6, ..synth }.write(&other, &mut |_| ()).unwrap();
            assert!(std::fs::read(&path).unwrap() != std::fs::read(&other).unwrap());
        }
    }

    #[test]
    fn nothing_is_written_over_and_nothing_half_is_left() {
        let folder = Scratch::new();
        let there = folder.write("there.gguf", b"mine");
        let synth = Synth { shape: TINY, format: Format::Q8_0, seed: 1 };
        assert!(synth.write(&there, &mut |_| ()).unwrap_err().to_string().contains("there.gguf"));
        assert_eq!(std::fs::read(&there).unwrap(), b"mine");
        let path = folder.path().join("odd.gguf");
        for (synth, part) in [
            (Synth { shape: Shape { hidden: 65, ..TINY }, ..synth }, "token_embd"),
            (Synth { format: Format::Q6_K, ..synth }, "Q6_K"),
        ] {
            let error = synth.write(&path, &mut |_| ()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
            assert!(!path.exists());
        }
    }

    /// Decoded blocks have mean 0 and the deviation asked for.
    #[test]
    fn values_have_the_deviation_asked_for() {
        for format in [Format::Q8_0, Format::Q4_0] {
            let mut draws = Draws(9);
            let mut values = Vec::new();
            for _ in 0..4000 {
                let mut block = vec![0; format.block_bytes()];
                fill(&mut block, (format, 0.03), &mut draws);
                let mut row = [0.0; 32];
                dequantize_row(format, &block, &mut row).unwrap();
                values.extend(row);
            }
            let n = values.len() as f32;
            let mean = values.iter().sum::<f32>() / n;
            let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n).sqrt();
            assert!(mean.abs() < 5e-4 && (deviation / 0.03 - 1.0).abs() < 0.03, "{format:?} {mean} {deviation}");
        }
    }
}
