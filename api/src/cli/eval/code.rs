//! Programs in answers, run with tests they have not seen. Owner: the command. Invariant: nothing runs unless --run-code
//! is given; each program gets a process and an empty folder of its own, no input and no environment, and limits of time,
//! memory and output; whatever it does, grading it ends.
//!
//! This keeps an honest mistake from doing harm (endless loops, large lists, files written, processes started). It is no
//! jail for code that wants to break out: run what you do not trust at all in a container.

use crate::cli::CliError;
use crate::cli::files::Passing;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use uuid::Uuid;

const PRELUDE: &str = include_str!("prelude.py");
/// Seconds of processor time.
const CPU_SECONDS: u32 = 5;
/// Seconds by the clock, for programs that wait; more than [`CPU_SECONDS`], for machines that are busy.
const WALL: Duration = Duration::from_secs(20);
/// Bytes of address space.
const MEMORY: u64 = 512 << 20;
/// Bytes of output; a program that prints more is wrong.
const OUTPUT_MAX: u64 = 64 << 10;

/// The program in an answer: its first fenced block (to the end where the fence is not closed), or all of it.
pub fn program(answer: &str) -> &str {
    let fence = |line: &str| line.trim_start().starts_with("```");
    let (mut start, mut at) = (None, 0);
    for line in answer.split_inclusive('\n') {
        match start {
            None if fence(line) => start = Some(at + line.len()),
            Some(start) if fence(line) => return &answer[start..at],
            _ => {}
        }
        at += line.len();
    }
    &answer[start.unwrap_or(0)..]
}

/// Where programs run.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// The interpreter itself, so that it is found without the environment.
    python: PathBuf,
    wall: Duration,
}

impl Sandbox {
    /// Finds `python3` and tries the limits.
    ///
    /// # Errors
    /// [`CliError::Usage`] when it is missing or a limit cannot be set.
    pub fn open() -> Result<Sandbox, CliError> {
        Sandbox::with("python3")
    }

    fn with(interpreter: &str) -> Result<Sandbox, CliError> {
        let broken =
            |why: String| CliError::Usage(format!("--run-code needs {interpreter} 3.8 or newer on Unix: {why}"));
        let asked = Command::new(interpreter).args(["-I", "-c", "import sys; print(sys.executable)"]).output();
        let asked = asked.map_err(|error| broken(format!("it cannot be started: {error}; install it")))?;
        let path = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
        if !asked.status.success() || path.is_empty() {
            return Err(broken(format!("it ended with {} and no path", asked.status)));
        }
        let sandbox = Sandbox { python: path.into(), wall: WALL };
        match sandbox.run("", "") {
            Ok(Ended { passed: true, .. }) => Ok(sandbox),
            Ok(Ended { output, .. }) => Err(broken(format!("an empty program fails: {}", output.trim()))),
            Err(error) => Err(broken(format!("an empty program cannot be run: {error}"))),
        }
    }

    /// Whether the program and then the tests run to the end without raising anything.
    ///
    /// # Errors
    /// The process cannot be started or its folder not be made; a program that fails is no error.
    pub fn passes(&self, program: &str, tests: &str) -> io::Result<bool> {
        self.run(program, tests).map(|ended| ended.passed)
    }

    fn run(&self, program: &str, tests: &str) -> io::Result<Ended> {
        // Whoever prints the mark has come to the end: an answer that leaves early with code 0 does not know it.
        let mark = Uuid::new_v4().simple().to_string();
        let folder = folder(&mark)?;
        std::fs::write(folder.path().join("answer.py"), program)?;
        std::fs::write(folder.path().join("tests.py"), tests)?;
        let mut child = Command::new(&self.python)
            .args(["-I", "-B", "-c", PRELUDE, &mark, &CPU_SECONDS.to_string(), &MEMORY.to_string()])
            .current_dir(folder.path())
            .env_clear()
            .env("LANG", "C.UTF-8")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let output = child.stdout.take().and_then(|stdout| self.output(stdout)).unwrap_or_default();
        end(&mut child)?;
        let output = String::from_utf8_lossy(&output).into_owned();
        Ok(Ended { passed: output.contains(&mark), output })
    }

    /// All that is printed; `None` if it takes too long or is too much.
    fn output(&self, stdout: ChildStdout) -> Option<Vec<u8>> {
        let (send, receive) = mpsc::sync_channel(1);
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let whole = stdout.take(OUTPUT_MAX + 1).read_to_end(&mut bytes);
            // Nobody listens any more after the time is up.
            let _ = send.send(whole.map(|_| bytes));
        });
        let bytes = receive.recv_timeout(self.wall).ok()?.ok()?;
        (bytes.len() as u64 <= OUTPUT_MAX).then_some(bytes)
    }
}

struct Ended {
    passed: bool,
    output: String,
}

/// Ends the process and all that it started in its group. The group's number is its own until it is waited for.
fn end(child: &mut Child) -> io::Result<()> {
    let group = format!("kill -9 -{}", child.id());
    let _ = Command::new("sh").args(["-c", &group]).stdin(Stdio::null()).stderr(Stdio::null()).status();
    let _ = child.kill();
    child.wait().map(drop)
}

/// A folder that is gone with its contents when it is dropped.
fn folder(name: &str) -> io::Result<Passing> {
    let folder = Passing::new(std::env::temp_dir().join(format!("tokenrouter-answer-{name}")));
    std::fs::create_dir(folder.path()).map(|()| folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn sandbox() -> Sandbox {
        Sandbox { wall: Duration::from_secs(60), ..Sandbox::open().expect("python3 is installed") }
    }

    #[test]
    fn the_first_block_is_the_program() {
        for (answer, expected) in [
            ("def f(): pass", "def f(): pass"),
            ("So:\n```python\na = 1\n```\nor\n```\nb = 2\n```", "a = 1\n"),
            ("```\na = 1\nb = 2", "a = 1\nb = 2"),
            ("  ```py\n  a\n  ```", "  a\n"),
            ("```python\n```", ""),
            ("```", ""),
            ("", ""),
            ("use `x`\n", "use `x`\n"),
        ] {
            assert_eq!(program(answer), expected, "{answer}");
        }
    }

    #[test]
    fn right_programs_pass_and_others_do_not() {
        let sandbox = sandbox();
        let tests = "assert double(2) == 4\nassert double(-1) == -2";
        for (program, expected) in [
            ("def double(x):\n    return 2 * x", true),
            ("import math, sys\nfrom typing import List\ndef double(x):\n    return x + x\nprint('done')", true),
            ("def double(x): return 2 * x\nif __name__ == '__main__':\n    double(int(input()))", true),
            ("def double(x):\n    return x * x", false),
            ("def double(x) return 2 * x", false),
            ("def twice(x): return 2 * x", false),
            ("", false),
            ("\0", false),
            // Leaving early is not passing.
            ("def double(x): return 2 * x\nraise SystemExit(0)", false),
            ("import os\nos._exit(0)", false),
            ("def double(x): return 2 * x\nassert double(2) == 5", false),
            // No input, no environment, nothing in the folder.
            ("def double(x): return 2 * x\ninput()", false),
            ("def double(x): return 2 * x\nimport os\nassert set(os.environ) <= {'LANG', 'LC_CTYPE', 'PWD'}", true),
            ("def double(x): return 2 * x\nimport os\nassert os.listdir('.') == []", true),
        ] {
            assert_eq!(sandbox.passes(program, tests).expect("it is run"), expected, "{program}");
        }
    }

    #[test]
    fn programs_that_would_do_harm_are_stopped() {
        let sandbox = sandbox();
        let there = std::env::temp_dir().join(format!("tokenrouter-harm-{}", std::process::id()));
        let open = format!("open({:?}, 'w').write('x')", there.display().to_string());
        for program in [
            "print('x' * 10_000_000)",
            "while True:\n    print('x')",
            "x = 'x' * (1 << 30)",
            "def f(): return f()\nf()",
            "import os\nif os.fork() == 0:\n    while True: pass",
            "import subprocess\nsubprocess.run(['true'])",
            "import os\nos.system('true')",
            "import os\nos.kill(os.getppid(), 0)",
            "import socket\nsocket.socket().connect(('127.0.0.1', 9))",
            "open('here', 'w')",
            &open,
        ] {
            let started = Instant::now();
            assert!(!sandbox.passes(program, "").expect("it is run"), "{program}");
            assert!(started.elapsed() < Duration::from_secs(50), "{program}");
        }
        assert!(!there.exists());
    }

    #[test]
    fn loops_and_waits_end() {
        let endless = sandbox();
        assert!(!endless.passes("while True: pass", "").expect("it is run"), "ended by its processor time");
        let short = Sandbox { wall: Duration::from_millis(300), ..endless };
        for program in ["while True: pass", "import time\ntime.sleep(1000)"] {
            let started = Instant::now();
            assert!(!short.passes(program, "").expect("it is run"), "{program}");
            assert!(started.elapsed() < Duration::from_secs(10), "{program}");
        }
    }

    #[test]
    fn a_missing_interpreter_is_said() {
        for (interpreter, part) in [("no-such-python", "cannot be started"), ("false", "no path")] {
            let error = Sandbox::with(interpreter).expect_err(interpreter).to_string();
            assert!(error.contains(interpreter) && error.contains(part), "{error}");
        }
    }
}
