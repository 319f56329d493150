//! Word splits of GPT-2 style vocabularies, by the name a GGUF file gives them (`tokenizer.ggml.pre`).
//! Owner: the GGUF vocabulary. Invariant: a name missing here is refused, because a wrong split gives wrong tokens silently.
//! Patterns: as `llama-vocab.cpp` of llama.cpp lists them; each is applied to the pieces the one before left.

/// A named way to split text into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreTokenizer {
    /// Patterns in order of application; a match is a piece, and so is what lies between two matches.
    pub patterns: &'static [&'static str],
    /// Whether a whole word that is a token is taken as it is, without merging.
    pub ignore_merges: bool,
    /// Whether a raw prompt starts with BOS where the file does not say.
    pub adds_bos: bool,
    /// Whether text is composed (Unicode NFC) first. Qwen2's published tokenizer does it; llama.cpp does not.
    pub nfc: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// Names as GGUF files spell them, and the split they mean.
const NAMES: [(&[&str], PreTokenizer); 10] = [
    (
        &["default"],
        PreTokenizer {
            patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
            ignore_merges: false,
            adds_bos: false,
            nfc: false,
        },
    ),
    (&["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"], PreTokenizer::plain(&[GPT2])),
    (
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        PreTokenizer::plain(&[r"\p{N}", GPT2]),
    ),
    (&["falcon"], PreTokenizer::plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"])),
    (
        &["llama3", "llama-v3", "llama-bpe", "falcon3"],
        PreTokenizer { patterns: &[LLAMA3], ignore_merges: true, adds_bos: true, nfc: false },
    ),
    (&["dbrx", "smaug-bpe"], PreTokenizer::plain(&[LLAMA3])),
    (&["qwen2"], PreTokenizer { nfc: true, ..PreTokenizer::plain(&[QWEN2]) }),
    (&["deepseek-r1-qwen", "stablelm2", "hunyuan"], PreTokenizer::plain(&[QWEN2])),
    (&["qwen35"], PreTokenizer::plain(&[QWEN35])),
    (&["deepseek-v3"], PreTokenizer::plain(&[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK3])),
];

impl PreTokenizer {
    const fn plain(patterns: &'static [&'static str]) -> Self {
        PreTokenizer { patterns, ignore_merges: false, adds_bos: false, nfc: false }
    }

    /// The split of this name.
    pub fn named(name: &str) -> Option<Self> {
        NAMES.iter().find(|(names, _)| names.contains(&name)).map(|&(_, split)| split)
    }

    /// All names, for a message.
    pub fn names() -> String {
        let names: Vec<&str> = NAMES.iter().flat_map(|(names, _)| names.iter().copied()).collect();
        names.join(", ")
    }
}
