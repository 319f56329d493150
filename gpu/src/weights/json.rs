//! JSON files of a model directory. Owner: the loaders. Invariant: a file is read whole only below a named limit, and
//! every error names the file and, where there is one, the key.

use super::error::{Result, WeightsError};
use serde::de::{DeserializeOwned, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::path::Path;

pub(super) use serde_json::Value as Json;

/// Longest JSON file, bytes.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// Reads a text file below the limit.
pub(super) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let len = std::fs::metadata(path).map_err(|reason| WeightsError::io(path, reason))?.len();
    if len > MAX_JSON_BYTES {
        let reason = format!("has {len} bytes, more than the limit of {MAX_JSON_BYTES}");
        return Err(WeightsError::invalid(path, "file", reason));
    }
    std::fs::read(path).map_err(|reason| WeightsError::io(path, reason))
}

/// Reads and parses a file into a type.
pub(super) fn read_as<T: DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_slice(&read_bytes(path)?).map_err(|error| WeightsError::invalid(path, "json", error.to_string()))
}

/// Reads and parses a file.
pub(super) fn read(path: &Path) -> Result<Json> {
    read_as(path)
}

/// Reads and parses a file if it exists.
pub(super) fn read_optional<T: DeserializeOwned + Default>(path: &Path) -> Result<T> {
    if path.exists() { read_as(path) } else { Ok(T::default()) }
}

/// The keys of a JSON object in order, repeated ones included.
pub(super) fn keys(bytes: &[u8]) -> std::result::Result<Vec<String>, String> {
    struct Keys;
    impl<'de> Visitor<'de> for Keys {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Vec<String>, A::Error> {
            let mut keys = Vec::new();
            while let Some((key, _)) = map.next_entry::<String, IgnoredAny>()? {
                keys.push(key);
            }
            Ok(keys)
        }
    }
    serde_json::Deserializer::from_slice(bytes).deserialize_map(Keys).map_err(|error| error.to_string())
}
