//! Programs of others that use the server: Python packages in virtual environments and Node packages, under
//! `target/test-clients`, installed once. Owner: whoever asks first, under a lock file. Invariant: an environment that is
//! handed out has the packages of its pins; it is made anew when they change.

use crate::assets::target_folder;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder of the suites and their pins.
pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("clients")
}

/// A folder for what the suites write and keep, made if need be.
///
/// # Panics
/// When the target folder cannot be written: a failed test.
pub fn scratch(name: &str) -> PathBuf {
    let target = target_folder().unwrap_or_else(|error| panic!("{error}"));
    let folder = target.join("test-clients").join(name);
    fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}

/// Runs a command to its end.
///
/// # Panics
/// When it cannot run or fails; its output and the remedy are told then.
pub fn run(command: &mut Command, remedy: &str) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} cannot run: {error}; {remedy}"));
    assert!(
        output.status.success(),
        "{command:?} failed: {}; {remedy}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// A copy of a folder with a `package-lock.json` beside the packages of that file, which are installed once and again when it
/// changes. What git ignores is not copied.
///
/// # Panics
/// When they cannot be installed: a failed test that names the remedy.
pub fn node_packages(sources: &Path, name: &str) -> PathBuf {
    let place = scratch(name);
    let guard = File::create(place.with_extension("lock")).expect("the target folder can be written");
    guard.lock().expect("the target folder can be locked");
    let wanted = fs::read_to_string(sources.join("package-lock.json")).expect("the lock file is there");
    clear(&place);
    copy(sources, &place);
    let done = place.join("installed.json");
    if !fs::read_to_string(&done).is_ok_and(|installed| installed == wanted) {
        let remedy = "install node 20 or newer with npm; npm must reach a registry (see npm config get registry)";
        let quiet = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"];
        run(Command::new("npm").args(quiet).current_dir(&place), remedy);
        fs::write(&done, wanted).expect("the target folder can be written");
    }
    place
}

/// Takes away what an earlier copy left, except what was installed.
fn clear(place: &Path) {
    for entry in fs::read_dir(place).expect("the target folder can be read") {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).expect("an entry");
        if name != "node_modules" && name != "installed.json" {
            let gone = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            gone.expect("the target folder can be written");
        }
    }
}

/// Folders of built things, which are not sources.
const BUILT: [&str; 3] = ["node_modules", "target", "dist"];

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
    for entry in fs::read_dir(from).unwrap_or_else(|error| panic!("{}: {error}", from.display())) {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).expect("an entry");
        if path.is_file() {
            fs::copy(&path, to.join(name)).expect("the target folder can be written");
        } else if !BUILT.iter().any(|built| name == *built) {
            copy(&path, &to.join(name));
        }
    }
}

/// A virtual environment with pinned packages.
#[derive(Clone, Debug)]
pub struct Venv {
    folder: PathBuf,
}

impl Venv {
    /// The environment of a file of pins in `tests/clients`, made first if need be.
    ///
    /// # Panics
    /// When it cannot be made: a failed test that names the remedy.
    pub fn of(requirements: &str) -> Venv {
        let pins = folder().join(requirements);
        let wanted = fs::read_to_string(&pins).unwrap_or_else(|error| panic!("{}: {error}", pins.display()));
        let name = Path::new(requirements).with_extension("");
        let folder = scratch(&name.to_string_lossy());
        let lock = File::create(folder.with_extension("lock")).expect("the target folder can be written");
        lock.lock().expect("the target folder can be locked");
        let (venv, done) = (Venv { folder: folder.join("venv") }, folder.join("installed.txt"));
        if !fs::read_to_string(&done).is_ok_and(|installed| installed == wanted) {
            let remedy = "install python3 with its venv module (Debian: apt-get install python3-venv)";
            run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv.folder), remedy);
            let remedy = "pip must reach a package index (see PIP_INDEX_URL)";
            let pip = ["-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check", "-r"];
            run(venv.python().args(pip).arg(&pins), remedy);
            fs::write(&done, wanted).expect("the target folder can be written");
        }
        venv
    }

    /// Its Python.
    pub fn python(&self) -> Command {
        self.program("python")
    }

    /// A program that one of its packages brings.
    pub fn program(&self, name: &str) -> Command {
        Command::new(self.folder.join("bin").join(name))
    }

    /// Runs a suite of `tests/clients` against a server: `FILE --url URL ARGUMENTS...`. It ends with a line that counts its
    /// checks.
    ///
    /// # Panics
    /// When a check fails, or none was made.
    pub fn suite(&self, file: &str, address: SocketAddr, arguments: &[&str]) {
        let mut command = self.python();
        // Whatever ends it, what it said before is told, and where it was.
        command
            .args(["-u", "-X", "faulthandler"])
            .arg(folder().join(file))
            .args(["--url", &format!("http://{address}")])
            .args(arguments);
        let output = run(&mut command, "see the checks that failed");
        let said = String::from_utf8_lossy(&output.stdout);
        println!("{said}");
        assert!(said.contains("checks passed"), "{file} ended without a count");
    }
}
