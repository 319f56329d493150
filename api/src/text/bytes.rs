//! From a vocabulary's spelling of a token to the bytes it stands for. Owner: the tokenizer. Invariant: the bytes of the
//! tokens of a text, joined, are the text.

/// How a vocabulary spells bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// GPT-2: every byte is one printable character.
    ByteLevel,
    /// SentencePiece: plain text, `▁` for a space, `<0xNN>` for a single byte.
    Metaspace,
}

impl Spelling {
    /// The bytes of an ordinary token.
    pub fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            Spelling::ByteLevel => byte_level(token),
            Spelling::Metaspace => match byte_token(token) {
                Some(byte) => vec![byte],
                None => token.replace('▁', " ").into_bytes(),
            },
        }
    }
}

/// Undoes the GPT-2 spelling; characters outside of its alphabet stand for themselves.
fn byte_level(token: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(token.len());
    for character in token.chars() {
        match byte_of(character) {
            Some(byte) => out.push(byte),
            None => out.extend(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    out
}

/// The byte that a character of GPT-2's alphabet stands for (`bytes_to_unicode` in GPT-2's encoder.py): printable Latin-1
/// stands for itself, the other bytes in order for U+0100, U+0101, ...
fn byte_of(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121) as u8 + 0x7f),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The byte of a byte-fallback token `<0xNN>`.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if hex { u8::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The character of GPT-2's alphabet that stands for a byte.
    pub fn char_of(byte: u8) -> char {
        let code = match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
            0x00..=0x20 => 0x100 + u32::from(byte),
            0x7f..=0xa0 => 0x121 + u32::from(byte) - 0x7f,
            0xad => 0x143,
        };
        char::from_u32(code).unwrap()
    }

    #[test]
    fn every_byte_has_one_character() {
        let all: std::collections::BTreeSet<char> = (0..=255).map(char_of).collect();
        assert_eq!(all.len(), 256);
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!((char_of(b' '), char_of(b'\n'), char_of(b'a')), ('Ġ', 'Ċ', 'a'));
    }

    #[test]
    fn spellings() {
        assert_eq!(Spelling::ByteLevel.bytes("Ġhello"), b" hello");
        assert_eq!(Spelling::ByteLevel.bytes("ä½ł"), "你".as_bytes());
        assert_eq!(Spelling::ByteLevel.bytes("▁x"), "▁x".as_bytes());
        assert_eq!(Spelling::Metaspace.bytes("▁I▁am"), b" I am");
        assert_eq!(Spelling::Metaspace.bytes("<0xE4>"), [0xe4]);
        assert_eq!(Spelling::Metaspace.bytes("<0xE41>"), b"<0xE41>");
        assert_eq!(Spelling::Metaspace.bytes("<0x+4>"), b"<0x+4>");
    }
}
