//! Links of pages: relative ones lead to a file, and their anchors to a heading of it. Pure but for reading the files.
//! Invariant: links of other hosts are judged by their form only; nothing is fetched.

use super::pages::Page;
use super::root;
use std::path::{Component, Path, PathBuf};

/// What is wrong with the links of a page: `docs/x.md:7: …`.
pub fn faults(page: &Page, pages: &[Page]) -> Vec<String> {
    let mut faults = Vec::new();
    for (number, line) in prose(&page.text) {
        for target in targets(&line) {
            if let Some(fault) = fault(page, pages, &target) {
                faults.push(format!("{}:{number}: {target}: {fault}", page.name));
            }
        }
    }
    faults
}

/// Files that a page names in backticks with a folder, that are not there.
pub fn missing_files(page: &Page) -> Vec<String> {
    let mut missing = Vec::new();
    for (number, line) in prose_with_code(&page.text) {
        for word in line.split('`').skip(1).step_by(2) {
            let path = word.split("::").next().unwrap_or(word);
            let ours = ["actors/", "api/", "config/", "gpu/", "kernels/", "tests/", "docs/"];
            let plain = path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
            if ours.iter().any(|folder| path.starts_with(folder)) && plain && !root().join(path).exists() {
                missing.push(format!("{}:{number}: `{path}` does not exist", page.name));
            }
        }
    }
    missing
}

fn fault(page: &Page, pages: &[Page], target: &str) -> Option<String> {
    if let Some((scheme, rest)) = target.split_once("://") {
        let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let fine = ["http", "https"].contains(&scheme) && !host.is_empty() && !target.contains(char::is_whitespace);
        return (!fine).then(|| "not an address".to_owned());
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let here = Path::new(&page.name);
    let file = if path.is_empty() { here.to_owned() } else { here.parent().unwrap_or(Path::new("")).join(path) };
    let Some(file) = plain(&file) else { return Some("leaves the repository".to_owned()) };
    let found = pages.iter().find(|page| Path::new(&page.name) == file);
    if found.is_none() && !root().join(&file).exists() {
        return Some("no such file".to_owned());
    }
    // The book holds docs/ alone.
    let leaves_the_book = page.name.starts_with("docs/") && !file.starts_with("docs");
    if leaves_the_book {
        return Some("leaves docs/, where the book cannot follow; name the file in backticks".to_owned());
    }
    let anchor = anchor?;
    let Some(found) = found else {
        return Some("an anchor in a file that is no page".to_owned());
    };
    (!anchors(&found.text).iter().any(|known| known == anchor)).then(|| "no such heading".to_owned())
}

/// A path without `.` and `..`.
fn plain(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir if plain.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(plain)
}

/// Lines outside blocks of code, with their numbers.
fn prose_with_code(text: &str) -> Vec<(usize, String)> {
    let (mut lines, mut fenced) = (Vec::new(), false);
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced && !line.starts_with("    ") {
            lines.push((at + 1, line.to_owned()));
        }
    }
    lines
}

/// The same without code within lines.
fn prose(text: &str) -> Vec<(usize, String)> {
    let without = |line: String| line.split('`').step_by(2).collect::<Vec<_>>().join("`");
    prose_with_code(text).into_iter().map(|(number, line)| (number, without(line))).collect()
}

/// Targets of the links and pictures of a line.
fn targets(line: &str) -> Vec<String> {
    let mut targets = Vec::new();
    for (mark, end) in [("](", ')'), ("src=\"", '"'), ("href=\"", '"'), ("srcset=\"", '"')] {
        let mut rest = line;
        while let Some((_, after)) = rest.split_once(mark) {
            let Some((target, after)) = after.split_once(end) else { break };
            targets.push(target.trim().to_owned());
            rest = after;
        }
    }
    targets
}

/// Anchors of the headings of a page, as hosts of Markdown and mdBook make them.
pub fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    for (_, line) in prose_with_code(text) {
        let Some(title) = line.strip_prefix('#').map(|rest| rest.trim_start_matches('#')) else { continue };
        let kept = |c: char| c.is_alphanumeric() || "_- ".contains(c);
        let slug: String = title.trim().to_lowercase().chars().filter(|c| kept(*c)).collect();
        let slug = slug.replace(' ', "-");
        let twins = anchors.iter().filter(|known| **known == slug || known.starts_with(&format!("{slug}-"))).count();
        anchors.push(if twins == 0 || !anchors.contains(&slug) { slug } else { format!("{slug}-{twins}") });
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(name: &str, text: &str) -> Page {
        Page { name: name.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn wrong_links_are_found() {
        let text = "# One two\n[a](#one-two) [b](#one) [c](nothing.md) `[d](no.md)` [e](https://) [f](../Cargo.toml)\n\
                    ```\n[g](no.md)\n```\n[h](operations.md#no-heading) ![i](https://x.y/z.png) [j](../../x)\n";
        let pages = [page("docs/x.md", text), page("docs/operations.md", "# A\n")];
        let found = faults(&pages[0], &pages).join("\n");
        let expected = [
            "docs/x.md:2: #one: no such heading",
            "docs/x.md:2: nothing.md: no such file",
            "docs/x.md:2: https://: not an address",
            "docs/x.md:2: ../Cargo.toml: leaves docs/, where the book cannot follow; name the file in backticks",
            "docs/x.md:6: operations.md#no-heading: no such heading",
            "docs/x.md:6: ../../x: leaves the repository",
        ];
        assert_eq!(found, expected.join("\n"));
        let text = "`config/presets` `api/src/nothing.rs::f` `tests/tests/x y` `NAME/x`";
        assert_eq!(missing_files(&page("docs/x.md", text)), ["docs/x.md:1: `api/src/nothing.rs` does not exist"]);
    }

    #[test]
    fn anchors_are_as_hosts_make_them() {
        let text = "# `plan --measure`: what, why?\n## Twice\n## Twice\n```\n# no\n```\n";
        assert_eq!(anchors(text), ["plan---measure-what-why", "twice", "twice-1"]);
    }
}
