//! Amounts of memory as people write them: `512 MiB`, `1.5 GiB`, `2000000`. Pure.

use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 9] = [
    ("", 1),
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(text.len());
        let (digits, unit) = text.split_at(split);
        let unit = unit.trim();
        let factor = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, factor)| *factor);
        let number = digits.replace('_', "").parse::<f64>().ok();
        match (number, factor) {
            (Some(number), Some(factor)) if number * (factor as f64) < 9e18 => {
                Ok(Bytes((number * factor as f64) as u64))
            }
            _ => Err(format!("`{text}` is not an amount of memory; write for example \"512 MiB\" or \"2 GiB\"")),
        }
    }
}

impl fmt::Display for Bytes {
    /// The largest binary unit that leaves at least 1, with one decimal where needed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, factor) =
            UNITS[1..6].iter().rev().find(|(_, factor)| self.0 >= *factor).copied().unwrap_or(("B", 1));
        if self.0.is_multiple_of(factor) {
            write!(f, "{} {name}", self.0 / factor)
        } else {
            write!(f, "{:.1} {name}", self.0 as f64 / factor as f64)
        }
    }
}

impl Serialize for Bytes {
    /// As people write it where that is exact, otherwise as a number.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = self.to_string();
        if text.parse() == Ok(*self) { serializer.serialize_str(&text) } else { serializer.serialize_u64(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts() {
        for (text, bytes) in [
            ("512 MiB", 512 << 20),
            ("512MiB", 512 << 20),
            ("1.5 GiB", 3 << 29),
            ("2_000_000", 2_000_000),
            ("64 kb", 64_000),
            ("0", 0),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for bad in ["", "MiB", "12 parsecs", "-5 MiB", "1e99 GiB", "99999999999 TiB", "1.2.3 MiB"] {
            let error = bad.parse::<Bytes>().expect_err(bad);
            assert!(error.contains(bad) && error.contains("512 MiB"), "{error}");
        }
        assert_eq!(Bytes(3 << 29).to_string(), "1.5 GiB");
        assert_eq!(Bytes(512 << 20).to_string(), "512 MiB");
        assert_eq!(Bytes(0).to_string(), "0 B");
    }
}
