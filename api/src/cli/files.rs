//! Files that commands write. Owner: the command. Invariant: a file is there whole or as it was before: it is written under
//! another name and renamed, and what a command has not finished when Ctrl-C ends it is taken away.

use super::CliError;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What must not outlive this process. One list for all threads: the one that hears of Ctrl-C is none of those that write.
static PASSING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn passing() -> MutexGuard<'static, Vec<PathBuf>> {
    PASSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file or folder that is removed when this value is dropped, or when Ctrl-C ends the command.
#[derive(Debug)]
pub struct Passing(PathBuf);

impl Passing {
    /// Promises to remove what will be here.
    pub fn new(path: PathBuf) -> Passing {
        passing().push(path.clone());
        Passing(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Gives it its lasting name.
    ///
    /// # Errors
    /// What the system says; it is removed then.
    pub fn keep_as(self, path: &Path) -> io::Result<()> {
        // Ctrl-C takes away all of it or nothing.
        let _held = passing();
        fs::rename(&self.0, path)
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        remove(&self.0);
        passing().retain(|path| *path != self.0);
    }
}

fn remove(path: &Path) {
    // What is not there any more, or not yet, is as good as removed.
    let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// Removes what the command has not finished. As long as the value lives nothing more is begun or finished.
pub fn discard() -> MutexGuard<'static, Vec<PathBuf>> {
    let held = passing();
    held.iter().for_each(|path| remove(path));
    held
}

/// A name beside a path for what is not finished.
pub fn beside(path: &Path) -> PathBuf {
    let mut part = OsString::from(".");
    part.push(path.file_name().unwrap_or_default());
    part.push(format!(".{}.part", std::process::id()));
    path.with_file_name(part)
}

/// Writes a whole file; `option` is what named it.
///
/// # Errors
/// What the system says, with the file's name.
pub fn write(path: &Path, bytes: &[u8], option: &str) -> Result<(), CliError> {
    whole(path, bytes)
        .map_err(|error| CliError::Usage(format!("{option} {}: cannot be written: {error}", path.display())))
}

/// As [`write`], with the system's own error.
///
/// # Errors
/// What the system says.
pub fn whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = Passing::new(beside(path));
    let mut file = File::create(part.path())?;
    file.write_all(bytes)?;
    file.sync_all()?;
    part.keep_as(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("tokenrouter-files-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    fn names(folder: &Path) -> Vec<OsString> {
        fs::read_dir(folder).expect("read").map(|entry| entry.expect("an entry").file_name()).collect()
    }

    #[test]
    fn files_are_replaced_whole_or_not_at_all() {
        let folder = folder("whole");
        let file = folder.join("found.json");
        for text in ["first", "second"] {
            write(&file, text.as_bytes(), "--out").expect("written");
            assert_eq!(fs::read_to_string(&file).expect("read"), text);
        }
        let taken = folder.join("taken");
        fs::create_dir(&taken).expect("a folder of that name");
        let error = write(&taken, b"x", "--out").expect_err("it is a folder").to_string();
        assert!(error.contains("--out") && error.contains("taken"), "{error}");
        assert_eq!(names(&folder).len(), 2, "{:?}", names(&folder));
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn what_is_not_finished_is_removed() {
        let folder = folder("passing");
        let (file, kept) = (Passing::new(folder.join("half")), Passing::new(folder.join("whole.part")));
        fs::write(file.path(), "half").expect("written");
        fs::write(kept.path(), "whole").expect("written");
        kept.keep_as(&folder.join("whole")).expect("renamed");
        drop(file);
        assert_eq!(names(&folder), ["whole"]);
        assert!(!passing().iter().any(|path| path.starts_with(&folder)));
        fs::remove_dir_all(folder).expect("removed");
    }
}
