//! What the word patterns and NFC must know of a character, as one byte each.
//!
//! The classes are those of the `regex` crates: the ranges come from `regex-syntax`, which the library's
//! own matcher uses.

use regex_syntax::hir::{Class, HirKind};
use std::sync::OnceLock;

/// `\p{L}`.
pub const LETTER: u8 = 1;
/// `\p{N}`.
pub const NUMBER: u8 = 2;
/// `\s`.
pub const SPACE: u8 = 4;
/// `\p{M}`.
pub const MARK: u8 = 8;

/// Characters that NFC leaves alone whatever stands around them, as long as only such characters do:
/// none is a combining mark, decomposes, or composes with another one of these ranges.
const STABLE: [(u32, u32); 10] = [
    (0x0000, 0x02ff),
    (0x0400, 0x0482),   // Cyrillic up to its combining marks
    (0x2010, 0x205e),   // general punctuation
    (0x20a0, 0x20bf),   // currency
    (0x2190, 0x2328),   // arrows, mathematics
    (0x232b, 0x2adb),   // technical, box drawing, dingbats, Braille
    (0x3040, 0x3098),   // Hiragana
    (0x30a0, 0x30ff),   // Katakana
    (0x4e00, 0x9fff),   // Han
    (0x1f300, 0x1faff), // emoji
];

/// See the module documentation.
pub struct Classes {
    table: Box<[u8]>,
}

impl Classes {
    /// The table, made once: about 1 MiB.
    pub fn get() -> &'static Self {
        static CLASSES: OnceLock<Classes> = OnceLock::new();
        CLASSES.get_or_init(|| {
            let mut table = vec![0u8; 0x11_0000].into_boxed_slice();
            for (pattern, bit) in [
                (r"\p{L}", LETTER),
                (r"\p{N}", NUMBER),
                (r"\s", SPACE),
                (r"\p{M}", MARK),
            ] {
                let hir = regex_syntax::parse(pattern).expect("a class of one escape");
                let HirKind::Class(Class::Unicode(class)) = hir.kind() else {
                    unreachable!("{pattern} is a class of characters");
                };
                for range in class.ranges() {
                    for c in range.start() as u32..=range.end() as u32 {
                        table[c as usize] |= bit;
                    }
                }
            }
            Self { table }
        })
    }

    /// The classes of a character.
    #[inline]
    pub fn of(&self, c: char) -> u8 {
        self.table[c as usize]
    }

    /// NFC certainly leaves the text alone.
    pub fn is_stable(&self, text: &str) -> bool {
        text.is_ascii()
            || text.chars().all(|c| {
                let c = c as u32;
                c < 0x300 || STABLE[1..].iter().any(|(from, to)| (*from..=*to).contains(&c))
            })
    }
}
