//! The code of a page, run as its reader would run it: shell commands, sessions with what they print, Python, files to save.
//! Owner: the test that made the workshop. Invariant: the only differences to what the page says are those of
//! [`SUBSTITUTIONS`] and of the shell's prelude; a server that a page starts is gone when its workshop is dropped.

use super::pages::{Block, Mark};
use super::root;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What is replaced in commands: text, replacement, reason. `PORT` is a free port.
pub const SUBSTITUTIONS: &[(&str, &str, &str)] = &[
    ("cargo run --release --", "tokenrouter", "the program under test, built already"),
    ("127.0.0.1:8080", "127.0.0.1:PORT", "the usual port may be taken on this machine"),
    ("--fresh 5000", "--fresh 60", "a head from fewer problems shows as well that the commands work"),
];

/// Seconds that one block may take.
const BLOCK_MAX: &str = "120";

/// `tokenrouter serve` stays in the foreground; here it goes on in the background, on the page's port, until the next one
/// or the end of the page. The block goes on when it listens. An answer that is an error ends a block.
const PRELUDE: &str = r#"
set -euo pipefail
curl() { command curl --fail-with-body "$@"; }
stop_server() {
    [ -f server.pid ] || return 0
    kill "$(cat server.pid)" 2>/dev/null || true
    for _ in $(seq 200); do kill -0 "$(cat server.pid)" 2>/dev/null || break; sleep 0.05; done
    rm -f server.pid
}
tokenrouter() {
    case " $* " in
        *" bench serve "*) command tokenrouter "$@"; return ;;
        *" serve "*|*" serve") ;;
        *) command tokenrouter "$@"; return ;;
    esac
    stop_server
    command tokenrouter "$@" --port "$DOCS_PORT" >server.out 2>server.err </dev/null &
    echo $! >server.pid
    for _ in $(seq 600); do
        grep -q '^serving' server.out && return 0
        kill -0 "$(cat server.pid)" 2>/dev/null || { cat server.out server.err; rm server.pid; return 1; }
        sleep 0.1
    done
    return 1
}
"#;

/// A folder in which the blocks of one page run, one after another.
pub struct Workshop {
    folder: PathBuf,
    port: u16,
    path: String,
}

impl Workshop {
    /// An empty one, with links to what the repository holds, `program` as `tokenrouter`, and the programs of `tools` (the
    /// `bin` folder of a virtual environment).
    ///
    /// # Panics
    /// When the folder cannot be made: a failed test.
    pub fn new(folder: PathBuf, program: &Path, tools: &Path) -> Workshop {
        let _ = std::fs::remove_dir_all(&folder);
        let bin = folder.join("bin");
        std::fs::create_dir_all(&bin).unwrap_or_else(|error| panic!("{}: {error}", bin.display()));
        std::os::unix::fs::symlink(program, bin.join("tokenrouter")).expect("a link to the program");
        for entry in std::fs::read_dir(root()).expect("the root is read") {
            let entry = entry.expect("an entry");
            let name = entry.file_name();
            if name != "target" && name != ".git" {
                std::os::unix::fs::symlink(entry.path(), folder.join(name)).expect("a link to the repository");
            }
        }
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{}:{path}", bin.display(), tools.display());
        Workshop { folder, port: free.port(), path }
    }

    fn substituted(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (from, to, _) in SUBSTITUTIONS {
            text = text.replace(from, &to.replace("PORT", &self.port.to_string()));
        }
        text
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", BLOCK_MAX, program]).args(arguments).current_dir(&self.folder);
        command.env("PATH", &self.path).env("DOCS_PORT", self.port.to_string());
        command.env("HOME", &self.folder).env("XDG_CACHE_HOME", self.folder.join("cache"));
        for variable in ["RUST_LOG", "HF_HOME", "TOKENROUTER_API_KEYS", "TOKENROUTER_ADMIN_KEY", "TOKENROUTER_FAULTS"] {
            command.env_remove(variable);
        }
        command.output().unwrap_or_else(|error| panic!("timeout {program}: {error}"))
    }

    /// Runs a block.
    ///
    /// # Errors
    /// What went wrong, with what it printed.
    pub fn run(&self, block: &Block) -> Result<(), String> {
        if let Mark::File(name) = &block.mark {
            let file = self.folder.join(name);
            return std::fs::write(&file, self.substituted(&block.text)).map_err(|error| format!("{name}: {error}"));
        }
        match block.language.as_str() {
            "sh" => self.shell(&block.text).and_then(succeeded),
            "python" => succeeded(said(&self.command("python", &["-c", &self.substituted(&block.text)]))),
            "console" => self.session(&block.text),
            _ => Ok(()),
        }
    }

    fn shell(&self, text: &str) -> Result<(bool, String), String> {
        Ok(said(&self.command("bash", &["-c", &format!("{PRELUDE}{}", self.substituted(text))])))
    }

    /// `$ command` lines and, below each, what it prints (in this order, `…` for anything).
    fn session(&self, text: &str) -> Result<(), String> {
        for step in text.split("$ ").filter(|step| !step.trim().is_empty()) {
            let (command, expected) = step.split_once('\n').unwrap_or((step, ""));
            let (_, printed) = self.shell(command)?;
            let mut rest = printed.as_str();
            for wanted in
                expected.lines().flat_map(|line| line.split('…')).map(str::trim).filter(|part| !part.is_empty())
            {
                let Some((_, after)) = rest.split_once(wanted) else {
                    return Err(format!("`{command}` should print `{wanted}` but printed\n{printed}"));
                };
                rest = after;
            }
        }
        Ok(())
    }
}

fn said(output: &Output) -> (bool, String) {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn succeeded((success, printed): (bool, String)) -> Result<(), String> {
    if success { Ok(()) } else { Err(printed) }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        // The folder may be gone; then there is no server either.
        let _ = self.shell("stop_server");
    }
}
