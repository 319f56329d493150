//! Compiled kernels on disk. Owner: [`super::compile`]. Invariant: what is found was made from this very source, for this
//! architecture, with these options, and is complete; everything else counts as absent. Failures to write cost nothing but
//! the next start's time.

use super::compile::{COMMON, Source, options};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// First line of a file.
const FORMAT: &str = "tokenrouter cubin 1";

/// FNV-1a with 64 bits (Fowler, Noll, Vo), from another start for each half of a key.
fn fnv(start: u64, parts: &[&str]) -> u64 {
    let mut hash = start;
    for byte in parts.iter().flat_map(|part| part.bytes().chain([0])) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash
}

/// Names a source with everything it is compiled with, but for the compiler.
fn key((source, arch): (&Source, &str)) -> String {
    let options = options(source, arch).join(" ");
    let headers = source.headers.iter().flat_map(|&(name, text)| [name, text]);
    let parts: Vec<&str> = [source.name, source.text, COMMON.1, &options].into_iter().chain(headers).collect();
    format!("{:016x}{:016x}", fnv(0xcbf2_9ce4_8422_2325, &parts), fnv(0x9ae1_6a3b_2f90_404f, &parts))
}

fn name(which: (&Source, &str), (major, minor): (i32, i32)) -> String {
    format!("{}-{}-{}-nvrtc{major}.{minor}.cubin", which.0.name.trim_end_matches(".cu"), which.1, key(which))
}

fn header(image: &[u8]) -> String {
    let sum = image
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let mut header = String::new();
    // Writing to a string does not fail.
    let _written = writeln!(header, "{FORMAT} {} {sum:016x}", image.len());
    header
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let end = bytes.iter().take(128).position(|&byte| byte == b'\n')? + 1;
    let image = bytes.get(end..)?;
    (header(image).as_bytes() == &bytes[..end]).then(|| image.to_vec())
}

/// What this compiler made, or without a compiler what any made.
pub(super) fn find(folder: &Path, which: (&Source, &str), version: Option<(i32, i32)>) -> Option<Vec<u8>> {
    if let Some(version) = version {
        return read(&folder.join(name(which, version)));
    }
    let key = key(which);
    let entries = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<PathBuf> =
        entries.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().contains(&key))).collect();
    found.sort();
    found.iter().rev().find_map(|path| read(path))
}

/// Keeps an image: written beside and renamed, so that nobody reads half of it.
pub(super) fn store(folder: &Path, which: (&Source, &str), version: (i32, i32), image: &[u8]) {
    let path = folder.join(name(which, version));
    let beside = path.with_extension(format!("{}.part", std::process::id()));
    let bytes = [header(image).as_bytes(), image].concat();
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&beside, bytes));
    if written.and_then(|()| std::fs::rename(&beside, &path)).is_err() {
        // A full or read-only disk: the next start compiles again.
        let _nothing_to_clean = std::fs::remove_file(&beside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Source = Source { name: "a.cu", text: "one", headers: &[], exact: false };
    const B: Source = Source { text: "two", ..A };
    const C: Source = Source { exact: true, ..A };
    const D: Source = Source { headers: &[("b.cuh", "three")], ..A };

    #[test]
    fn only_what_was_made_from_the_same_is_found() {
        let folder = std::env::temp_dir().join(format!("tokenrouter-cubin-{}", std::process::id()));
        let _left_over = std::fs::remove_dir_all(&folder);
        assert_eq!(find(&folder, (&A, "sm_90"), Some((12, 9))), None);
        store(&folder, (&A, "sm_90"), (12, 9), b"code");
        assert_eq!(find(&folder, (&A, "sm_90"), Some((12, 9))).as_deref(), Some(&b"code"[..]));
        assert_eq!(find(&folder, (&A, "sm_90"), None).as_deref(), Some(&b"code"[..]), "any compiler's will do");
        assert_eq!(find(&folder, (&A, "sm_90"), Some((12, 8))), None, "another compiler");
        assert_eq!(find(&folder, (&A, "sm_80"), Some((12, 9))), None, "another architecture");
        assert_eq!(find(&folder, (&B, "sm_90"), Some((12, 9))), None, "another text");
        assert_eq!(find(&folder, (&C, "sm_90"), Some((12, 9))), None, "other options");
        assert_eq!(find(&folder, (&D, "sm_90"), Some((12, 9))), None, "another header");
        let file = folder.join(name((&A, "sm_90"), (12, 9)));
        let whole = std::fs::read(&file).expect("it was stored");
        for damaged in [&whole[..whole.len() - 1], b"", b"tokenrouter cubin 1 4 0\ncode"] {
            std::fs::write(&file, damaged).expect("the folder is ours");
            assert_eq!(find(&folder, (&A, "sm_90"), Some((12, 9))), None, "{damaged:?}");
        }
        std::fs::remove_dir_all(&folder).expect("the folder is ours");
    }
}
