//! The embedded default: the demo pair inside the program, laid out in a cache folder so that it is loaded like any
//! other pair. Owner: the launcher. Invariant: the folder is named after its contents, and every file is compared before
//! it is used, so neither another version nor a damaged file is ever taken.

use super::LaunchError;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the launch file in the folder.
pub const LAUNCH_FILE: &str = "launch.toml";
/// Name of the held-out problems in the folder.
pub const PROBLEMS: &str = "problems.jsonl";

macro_rules! demo {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../../config/demo/", $name)))),*]
    };
}

const FILES: [(&str, &[u8]); 12] = demo![
    "launch.toml",
    "problems.jsonl",
    "small/config.json",
    "small/generation_config.json",
    "small/tokenizer.json",
    "small/tokenizer_config.json",
    "small/model.safetensors",
    "large/config.json",
    "large/generation_config.json",
    "large/tokenizer.json",
    "large/tokenizer_config.json",
    "large/model.safetensors",
];

/// Puts the embedded files into `cache/demo-FINGERPRINT` unless they are there, and returns that folder.
///
/// # Errors
/// [`LaunchError::Embedded`] when the folder cannot be written.
pub fn lay_out(cache: &Path) -> Result<PathBuf, LaunchError> {
    let folder = cache.join(format!("demo-{:016x}", fingerprint(&FILES)));
    match write_all(&folder, &FILES) {
        Ok(()) => Ok(folder),
        Err(reason) => Err(LaunchError::Embedded { folder, reason }),
    }
}

fn write_all(folder: &Path, files: &[(&str, &[u8])]) -> io::Result<()> {
    for (name, bytes) in files {
        let path = folder.join(name);
        if std::fs::read(&path).is_ok_and(|found| found == *bytes) {
            continue;
        }
        let parent = path.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent)?;
        // Written aside and renamed: another process never sees half a file.
        let part = path.with_extension(format!("part-{}", std::process::id()));
        std::fs::write(&part, bytes)?;
        std::fs::rename(&part, &path)?;
    }
    Ok(())
}

/// FNV-1a over names and contents.
fn fingerprint(files: &[(&str, &[u8])]) -> u64 {
    let bytes = files.iter().flat_map(|(name, bytes)| name.bytes().chain([0]).chain(bytes.iter().copied()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_once_and_repaired() {
        let folder = std::env::temp_dir().join(format!("tokenrouter-embedded-{}", std::process::id()));
        let files: [(&str, &[u8]); 2] = [("a.txt", b"one"), ("sub/b.txt", b"two")];
        write_all(&folder, &files).expect("written");
        let before = std::fs::metadata(folder.join("a.txt")).and_then(|data| data.modified()).expect("a time");
        std::fs::write(folder.join("sub/b.txt"), b"damaged").expect("damaged");
        write_all(&folder, &files).expect("repaired");
        assert_eq!(std::fs::read(folder.join("sub/b.txt")).expect("b"), b"two");
        let after = std::fs::metadata(folder.join("a.txt")).and_then(|data| data.modified()).expect("a time");
        assert_eq!(before, after, "a good file is left alone");
        assert_eq!(std::fs::read_dir(&folder).expect("the folder").count(), 2, "no part file stays");
        std::fs::remove_dir_all(&folder).expect("removed");
        assert_ne!(fingerprint(&files), fingerprint(&[("a.txt", b"one"), ("sub/b.txt", b"twp")]));
        assert_ne!(fingerprint(&[("a", b"b")]), fingerprint(&[("ab", b"")]));
    }
}
