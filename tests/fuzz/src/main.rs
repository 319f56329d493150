//! Fuzzing: what reads bytes of others takes any bytes. Owner: tests/tests/fuzz.rs, which builds and runs this program.
//! Invariant: one program holds all targets and FUZZ_TARGET names the one to run; files a target needs lie in
//! FUZZ_SCRATCH. All other arguments are libFuzzer's.

#![no_main]

mod targets;

use std::sync::OnceLock;

static TARGET: OnceLock<targets::Target> = OnceLock::new();

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let run = TARGET.get_or_init(|| {
        // A panic that is caught is no finding; one that is not ends the program all the same.
        drop(std::panic::take_hook());
        let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a target");
        let known = targets::ALL.iter().find(|(known, _)| *known == name);
        known.unwrap_or_else(|| panic!("no target {name:?}; see tests/fuzz/src/targets.rs")).1
    });
    run(data);
});
