//! Random inputs: none makes the parser panic, hang or grow without bound, and every refusal names a place
//! and a way out. Case N is always the same input, so a failure is found again by its number.
//!
//! `LEGORL_FUZZ_CASES` sets the number of cases of each test; the long list of tests runs a million.

use super::tests::evaluate_bytes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::panic::{catch_unwind, AssertUnwindSafe};

fn cases() -> u64 {
    let wanted = std::env::var("LEGORL_FUZZ_CASES").ok();
    wanted.map_or(20_000, |text| {
        text.parse().expect("LEGORL_FUZZ_CASES is a whole number")
    })
}

/// Evaluates the input of every case. Both outcomes must occur: inputs that all fail at the first character
/// would test nothing.
fn check(make: impl Fn(&mut ChaCha8Rng) -> Vec<u8>) {
    let (mut accepted, mut refused) = (0_u64, 0_u64);
    for case in 0..cases() {
        let input = make(&mut ChaCha8Rng::seed_from_u64(case));
        let outcome = catch_unwind(AssertUnwindSafe(|| evaluate_bytes(&input).map(drop)));
        match outcome {
            Ok(Ok(())) => accepted += 1,
            Ok(Err(error)) => {
                refused += 1;
                let placed = error.location.line >= 1 && error.location.column >= 1;
                assert!(placed && !error.help.is_empty(), "case {case}: {error}");
            }
            Err(_) => panic!(
                "case {case} breaks the parser: {:?}",
                String::from_utf8_lossy(&input)
            ),
        }
    }
    println!("{accepted} inputs were understood, {refused} refused");
    assert!(
        accepted > 0 && refused > 0,
        "{accepted} understood, {refused} refused"
    );
}

/// Pieces of the language in any order, so that most inputs get past the first character.
#[test]
fn no_mixture_of_its_pieces_breaks_the_parser() {
    const PIECES: &[&str] = &[
        "X=", "A=", "export ", ": ", "\"", "'", "`", "\\", "${", "}", "${A:-", "${X:=", "${A:?", "${A:+",
        "$((", "))", "$(date +", "$(", ")", "(", "\n", "\r\n", " ", "#", "1", "+", "**", "%", "?", ":",
        "M=(", "$A", "é", "\0", ";",
    ];
    check(|random| {
        let count = random.random_range(0..40);
        let pieces = (0..count).map(|_| PIECES[random.random_range(0..PIECES.len())]);
        pieces.collect::<String>().into_bytes()
    });
}

#[test]
fn no_bytes_break_the_parser() {
    check(|random| {
        let mut bytes = vec![0_u8; random.random_range(0..200)];
        random.fill(bytes.as_mut_slice());
        // Most bytes are no text; half of the inputs are kept to characters.
        if random.random() {
            bytes.iter_mut().for_each(|b| *b = (*b % 96) + 32);
        }
        // A third of them starts as a comment does, which is understood.
        if random.random_range(0..3) == 0 {
            bytes.retain(|b| b.is_ascii() && *b != b'\n');
            bytes.insert(0, b'#');
        }
        bytes
    });
}

const CORPUS: &[&str] = &[
    include_str!("../../../configs/demo.env"),
    include_str!("../../../configs/demo_async.env"),
    include_str!("../../../configs/templates/verl/common.env"),
    include_str!("../../../configs/templates/backend/k8s.env"),
    include_str!("../../../configs/templates/infer/common.env"),
    "E=run-$(date -u +%Y%m%d)\nexport A='[{\"x\": 1}]' B=\"${A:-${E:+$((1 + 2 * 3))}}\" \\\n  C=3\n: \"${D:?needed}\"\n",
];

fn mutate(bytes: &mut Vec<u8>, at: usize, byte: u8, edit: u8) {
    if bytes.is_empty() {
        return;
    }
    let at = at % bytes.len();
    let end = bytes[at..]
        .iter()
        .position(|b| *b == b'\n')
        .map_or(bytes.len(), |n| at + n);
    match edit {
        0 => bytes[at] = byte,
        1 => bytes.insert(at, byte),
        2 => drop(bytes.remove(at)),
        3 => drop(bytes.drain(at..end)),
        4 => {
            let line = bytes[at..end].to_vec();
            bytes.splice(end..end, line);
        }
        _ => bytes.insert(at, b"$\"'`(){}\\#\n"[usize::from(byte) % 11]),
    }
}

/// Real files with bytes changed, lines dropped, doubled and swapped.
#[test]
fn no_change_of_a_real_file_breaks_the_parser() {
    check(|random| {
        let mut bytes = CORPUS[random.random_range(0..CORPUS.len())].as_bytes().to_vec();
        for _ in 0..random.random_range(1..12) {
            let at = random.random_range(0..usize::from(u16::MAX));
            mutate(&mut bytes, at, random.random(), random.random_range(0..6));
        }
        bytes
    });
}
