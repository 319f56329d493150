//! Where a model comes from: a folder, a GGUF file, or a repository of a model hub. Pure.

use serde::{Serialize, Serializer};
use std::fmt;
use std::path::{Path, PathBuf};

/// Where a model's files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A folder in Hugging Face layout or a `.gguf` file.
    Local(PathBuf),
    /// A repository to download from.
    Hub(HubSource),
}

/// `hf:owner/name[@revision][:file.gguf]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSource {
    /// `owner/name`.
    pub repo: String,
    /// Branch, tag or commit; `main` when not given.
    pub revision: String,
    /// One GGUF file of the repository instead of the safetensors it holds.
    pub file: Option<String>,
}

impl Source {
    /// Reads the `path` of a model; a relative path is relative to `folder` (where the launch file lies).
    ///
    /// # Errors
    /// What is wrong with it and the form that would be right.
    pub fn parse(text: &str, folder: &Path) -> Result<Source, String> {
        match text.strip_prefix("hf:") {
            Some(hub) => HubSource::parse(hub)
                .map(Source::Hub)
                .ok_or_else(|| format!("`{text}` is not of the form hf:owner/name[@revision][:file.gguf]")),
            None if text.trim().is_empty() => Err("is empty; name a folder, a .gguf file or hf:owner/name".to_owned()),
            None => Ok(Source::Local(folder.join(text))),
        }
    }
}

impl HubSource {
    fn parse(text: &str) -> Option<HubSource> {
        let (rest, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let (owner, name) = repo.split_once('/')?;
        let plain = |part: &str| {
            !part.is_empty()
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
                && part.chars().any(|c| c != '.')
        };
        let revision_ok = revision.split('/').all(plain);
        let file_ok = file.is_none_or(|file| file.to_lowercase().ends_with(".gguf") && file.split('/').all(plain));
        (plain(owner) && plain(name) && revision_ok && file_ok).then(|| HubSource {
            repo: repo.to_owned(),
            revision: revision.to_owned(),
            file: file.map(str::to_owned),
        })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Local(path) => write!(f, "{}", path.display()),
            Source::Hub(hub) => hub.fmt(f),
        }
    }
}

impl fmt::Display for HubSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}", self.repo)?;
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
        }
        match &self.file {
            Some(file) => write!(f, ":{file}"),
            None => Ok(()),
        }
    }
}

impl Serialize for Source {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names_read_and_print_alike() {
        for text in ["hf:Qwen/Qwen3-0.6B", "hf:a/b@v1.0", "hf:a/b:q8_0.gguf", "hf:a/b@refs/pr/3:sub/x.GGUF"] {
            let source = Source::parse(text, Path::new("")).expect(text);
            assert!(matches!(source, Source::Hub(_)), "{text}");
            assert_eq!(source.to_string(), text);
        }
        for bad in [
            "hf:",
            "hf:name",
            "hf:a/b/c",
            "hf:../b",
            "hf:a/b@",
            "hf:a/b:",
            "hf:a/b:x.bin",
            "hf:a/b:../x.gguf",
            "hf:a b/c",
        ] {
            let error = Source::parse(bad, Path::new("")).expect_err(bad);
            assert!(error.contains(bad) && error.contains("hf:owner/name"), "{error}");
        }
    }

    #[test]
    fn relative_paths_belong_to_the_file() {
        let folder = Path::new("presets");
        assert_eq!(Source::parse("m", folder), Ok(Source::Local(PathBuf::from("presets/m"))));
        assert_eq!(Source::parse("/m", folder), Ok(Source::Local(PathBuf::from("/m"))));
    }
}
