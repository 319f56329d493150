//! Files that commands write. Owner: the command. Invariant: a file is there whole or as it was before: it is written under
//! another name and renamed, and what is left of an interrupted run is never taken for a result.

use super::CliError;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

/// Writes a whole file; `option` is what named it.
///
/// # Errors
/// What the system says, with the file's name.
pub fn write(path: &Path, bytes: &[u8], option: &str) -> Result<(), CliError> {
    whole(path, bytes)
        .map_err(|error| CliError::Usage(format!("{option} {}: cannot be written: {error}", path.display())))
}

fn whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut part = OsString::from(".");
    part.push(path.file_name().unwrap_or_default());
    part.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(part);
    let written = std::fs::File::create(&part).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.and_then(|()| std::fs::rename(&part, path)).inspect_err(|_| {
        // The error that matters is the first one.
        let _ = std::fs::remove_file(&part);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("tokenrouter-files-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("found.json");
        for text in ["first", "second"] {
            write(&file, text.as_bytes(), "--out").expect("written");
            assert_eq!(std::fs::read_to_string(&file).expect("read"), text);
        }
        let taken = folder.join("taken");
        std::fs::create_dir(&taken).expect("a folder of that name");
        let error = write(&taken, b"x", "--out").expect_err("it is a folder").to_string();
        assert!(error.contains("--out") && error.contains("taken"), "{error}");
        let left: Vec<_> =
            std::fs::read_dir(&folder).expect("read").map(|entry| entry.expect("an entry").file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
        std::fs::remove_dir_all(folder).expect("removed");
    }
}
