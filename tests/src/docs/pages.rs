//! Pages and the blocks of code in them. Pure but for reading the files. Invariant: a block knows its line.

use super::root;
use std::path::{Path, PathBuf};

/// A Markdown file.
#[derive(Debug)]
pub struct Page {
    /// From the root: `docs/deploy.md`.
    pub name: String,
    /// What it says.
    pub text: String,
}

/// A block of code.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    /// Number of its first line, from 1.
    pub line: usize,
    /// What stands behind the fence; empty for a block that is only indented.
    pub language: String,
    /// The comment above it.
    pub mark: Mark,
    /// Its lines.
    pub text: String,
}

/// What `<!-- … -->` above a block says of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Mark {
    /// Nothing.
    #[default]
    None,
    /// `not run: REASON`.
    NotRun(String),
    /// `file: NAME`: the reader saves it under this name.
    File(String),
    /// `from: PATH`: a piece of this file.
    From(String),
}

/// The pages of the root and of docs/, in order of their names.
///
/// # Panics
/// When they cannot be read: a failed test.
pub fn all() -> Vec<Page> {
    let mut files = Vec::new();
    collect(&root().join("docs"), &mut files);
    files.extend(["README.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(|name| root().join(name)));
    let page = |file: PathBuf| {
        let name = file.strip_prefix(root()).expect("below the root").display().to_string();
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        Page { name, text }
    };
    let mut pages: Vec<Page> = files.into_iter().map(page).collect();
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    pages
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|end| end == "md") {
            files.push(path);
        }
    }
}

impl Page {
    /// The blocks of code, in order.
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let (mut fenced, mut mark, mut gap) = (false, Mark::None, true);
        for (at, line) in self.text.lines().enumerate() {
            if let Some(language) = line.trim_start().strip_prefix("```") {
                fenced = !fenced;
                if fenced {
                    let language = language.split([',', ' ']).next().unwrap_or_default().to_owned();
                    blocks.push(Block { line: at + 2, language, mark: std::mem::take(&mut mark), text: String::new() });
                }
                gap = true;
                continue;
            }
            if fenced {
                push(&mut blocks, line);
            } else if let (Some(code), true) = (line.strip_prefix("    "), gap || is_indented(&blocks, at)) {
                if !is_indented(&blocks, at) {
                    blocks.push(Block { line: at + 1, language: String::new(), mark: Mark::None, text: String::new() });
                }
                push(&mut blocks, code);
            } else {
                gap = line.trim().is_empty();
                mark = if gap { mark } else { comment(line) };
            }
        }
        blocks
    }
}

fn push(blocks: &mut [Block], line: &str) {
    if let Some(block) = blocks.last_mut() {
        block.text.push_str(line);
        block.text.push('\n');
    }
}

/// Whether the line at this index would go on with the last block, an indented one.
fn is_indented(blocks: &[Block], at: usize) -> bool {
    blocks.last().is_some_and(|block| block.language.is_empty() && block.line + block.text.lines().count() == at + 1)
}

fn comment(line: &str) -> Mark {
    let inner = line.trim().strip_prefix("<!--").and_then(|rest| rest.strip_suffix("-->")).unwrap_or_default().trim();
    match inner.split_once(": ") {
        Some(("not run", reason)) => Mark::NotRun(reason.to_owned()),
        Some(("file", name)) => Mark::File(name.to_owned()),
        Some(("from", path)) => Mark::From(path.to_owned()),
        _ => Mark::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_with_their_marks() {
        let text = "Words\n\n    tokenrouter serve\n    curl x\n\nmore\n    no code\n\n<!-- not run: 18 GB -->\n```sh\na\n\nb\n```\n\
                    ```toml\nc = 1\n```\n<!-- file: x.toml -->\n\n```toml\nd = 1\n```\n";
        let blocks = Page { name: String::new(), text: text.to_owned() }.blocks();
        let block = |line, language: &str, mark, text: &str| Block {
            line,
            language: language.to_owned(),
            mark,
            text: text.to_owned(),
        };
        let expected = [
            block(3, "", Mark::None, "tokenrouter serve\ncurl x\n"),
            block(11, "sh", Mark::NotRun("18 GB".to_owned()), "a\n\nb\n"),
            block(16, "toml", Mark::None, "c = 1\n"),
            block(21, "toml", Mark::File("x.toml".to_owned()), "d = 1\n"),
        ];
        assert_eq!(blocks, expected);
    }
}
