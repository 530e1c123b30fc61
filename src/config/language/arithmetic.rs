//! `$(( … ))`: parsing by precedence, evaluation on checked 64-bit numbers.

use super::super::error::{LanguageError, Location};
use super::{ast::*, cursor::fail_at, parser::Parser};

type Parsed<T> = Result<T, LanguageError>;

/// Operators from loose to tight. Longer spellings stand before their prefixes.
const LEVELS: &[&[(&str, Binary)]] = &[
    &[("||", Binary::Or)],
    &[("&&", Binary::And)],
    &[("==", Binary::Equal), ("!=", Binary::NotEqual)],
    &[
        ("<=", Binary::LessEqual),
        (">=", Binary::GreaterEqual),
        ("<", Binary::Less),
        (">", Binary::Greater),
    ],
    &[("+", Binary::Add), ("-", Binary::Subtract)],
    &[
        ("*", Binary::Multiply),
        ("/", Binary::Divide),
        ("%", Binary::Remainder),
    ],
];

/// Deepest nesting of parentheses, signs and choices.
const MAX_DEPTH: u32 = 40;

pub(super) fn skip_space(parser: &mut Parser) {
    parser.cursor.skip_blanks();
    while parser.cursor.peek() == Some('\n') {
        parser.cursor.skip(1);
        parser.cursor.skip_blanks();
    }
}

pub(super) fn expression(parser: &mut Parser) -> Parsed<Expression> {
    if parser.depth >= MAX_DEPTH {
        return parser.cursor.fail(
            "the expression is nested too deep",
            "use a variable for the inner part",
        );
    }
    parser.depth += 1;
    let result = choice(parser);
    parser.depth -= 1;
    result
}

fn choice(parser: &mut Parser) -> Parsed<Expression> {
    let location = parser.cursor.location();
    let condition = level(parser, 0)?;
    skip_space(parser);
    if parser.cursor.peek() != Some('?') {
        return Ok(condition);
    }
    parser.cursor.skip(1);
    let yes = expression(parser)?;
    skip_space(parser);
    if parser.cursor.peek() != Some(':') {
        return parser
            .cursor
            .fail("`:` is missing after `?`", "write condition ? value : other");
    }
    parser.cursor.skip(1);
    let no = expression(parser)?;
    Ok(Expression {
        location,
        kind: ExpressionKind::Choose(Box::new(condition), Box::new(yes), Box::new(no)),
    })
}

fn level(parser: &mut Parser, index: usize) -> Parsed<Expression> {
    let Some(operators) = LEVELS.get(index) else {
        return power(parser);
    };
    let mut left = level(parser, index + 1)?;
    loop {
        skip_space(parser);
        let location = parser.cursor.location();
        let is_power = parser.cursor.starts_with("**");
        let found = operators.iter().find(|(text, operator)| {
            parser.cursor.starts_with(text) && !(is_power && *operator == Binary::Multiply)
        });
        let Some((text, operator)) = found else {
            return Ok(left);
        };
        parser.cursor.skip(text.len());
        let right = level(parser, index + 1)?;
        left = Expression {
            location,
            kind: ExpressionKind::Binary(*operator, Box::new(left), Box::new(right)),
        };
    }
}

fn power(parser: &mut Parser) -> Parsed<Expression> {
    let base = unary(parser)?;
    skip_space(parser);
    if !parser.cursor.starts_with("**") {
        return Ok(base);
    }
    let location = parser.cursor.location();
    parser.cursor.skip(2);
    // Right-associative: 2**3**2 is 2**9.
    let exponent = deeper(parser, power)?;
    Ok(Expression {
        location,
        kind: ExpressionKind::Binary(Binary::Power, Box::new(base), Box::new(exponent)),
    })
}

fn deeper(parser: &mut Parser, parse: fn(&mut Parser) -> Parsed<Expression>) -> Parsed<Expression> {
    if parser.depth >= MAX_DEPTH {
        return parser.cursor.fail(
            "the expression is nested too deep",
            "use a variable for the inner part",
        );
    }
    parser.depth += 1;
    let result = parse(parser);
    parser.depth -= 1;
    result
}

fn unary(parser: &mut Parser) -> Parsed<Expression> {
    skip_space(parser);
    let location = parser.cursor.location();
    let operator = match parser.cursor.peek() {
        Some('-') => Unary::Minus,
        Some('+') => Unary::Plus,
        Some('!') => Unary::Not,
        _ => return atom(parser),
    };
    parser.cursor.skip(1);
    let inner = deeper(parser, unary)?;
    Ok(Expression {
        location,
        kind: ExpressionKind::Unary(operator, Box::new(inner)),
    })
}

fn atom(parser: &mut Parser) -> Parsed<Expression> {
    let location = parser.cursor.location();
    let kind = match parser.cursor.peek() {
        Some('(') => {
            parser.cursor.skip(1);
            let inner = expression(parser)?;
            skip_space(parser);
            if parser.cursor.peek() != Some(')') {
                return fail_at(location, "this `(` is never closed", "close it with `)`");
            }
            parser.cursor.skip(1);
            return Ok(inner);
        }
        Some('$') if parser.cursor.peek_at(1) == Some('{') => {
            let part = parser.braces(location.clone(), true)?;
            ExpressionKind::Text(Word { parts: vec![part] })
        }
        Some('$') => {
            parser.cursor.skip(1);
            ExpressionKind::Name(name(parser, &location)?)
        }
        Some(c) if c.is_ascii_digit() => {
            let mut text = String::new();
            while let Some(c) = parser
                .cursor
                .peek()
                .filter(|c| c.is_ascii_alphanumeric() || *c == '.' || *c == '#')
            {
                text.push(c);
                parser.cursor.skip(1);
            }
            ExpressionKind::Number(number(&location, &text, "this number")?)
        }
        _ => ExpressionKind::Name(name(parser, &location)?),
    };
    Ok(Expression { location, kind })
}

fn name(parser: &mut Parser, location: &Location) -> Parsed<String> {
    let name = parser.cursor.name();
    if name.is_empty() {
        let what = parser.cursor.preview();
        return fail_at(
            location.clone(),
            format!("`{what}` is not a number or a name"),
            "arithmetic holds whole numbers, names, + - * / % ** and parentheses",
        );
    }
    Ok(name)
}

/// A whole number as shells write it, without octal: a leading zero is refused because it would
/// silently mean another number there.
pub(super) fn number(location: &Location, text: &str, what: &str) -> Parsed<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let parsed = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hex) => i64::from_str_radix(hex, 16).ok(),
        None if digits.len() > 1 && digits.starts_with('0') => {
            return fail_at(
                location.clone(),
                format!("{what} is `{text}`, and a leading zero means octal in shells"),
                "write it without the zero",
            )
        }
        None if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) => None,
        None => digits.parse::<i64>().ok(),
    };
    match parsed {
        Some(n) => Ok(if text.starts_with('-') { -n } else { n }),
        None => fail_at(
            location.clone(),
            format!("{what} is `{text}`, which is not a whole number of 64 bits"),
            "arithmetic is on whole numbers",
        ),
    }
}

pub(super) fn apply_unary(operator: Unary, value: i64, location: &Location) -> Parsed<i64> {
    match operator {
        Unary::Plus => Ok(value),
        Unary::Not => Ok(i64::from(value == 0)),
        Unary::Minus => value.checked_neg().map_or_else(|| overflow(location), Ok),
    }
}

pub(super) fn apply_binary(operator: Binary, a: i64, b: i64, location: &Location) -> Parsed<i64> {
    let value = match operator {
        Binary::Or => Some(i64::from(a != 0 || b != 0)),
        Binary::And => Some(i64::from(a != 0 && b != 0)),
        Binary::Equal => Some(i64::from(a == b)),
        Binary::NotEqual => Some(i64::from(a != b)),
        Binary::Less => Some(i64::from(a < b)),
        Binary::LessEqual => Some(i64::from(a <= b)),
        Binary::Greater => Some(i64::from(a > b)),
        Binary::GreaterEqual => Some(i64::from(a >= b)),
        Binary::Add => a.checked_add(b),
        Binary::Subtract => a.checked_sub(b),
        Binary::Multiply => a.checked_mul(b),
        Binary::Divide | Binary::Remainder if b == 0 => {
            return fail_at(
                location.clone(),
                "division by zero",
                "check the variable on the right",
            )
        }
        Binary::Divide => a.checked_div(b),
        Binary::Remainder => a.checked_rem(b),
        Binary::Power => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
    };
    value.map_or_else(|| overflow(location), Ok)
}

fn overflow(location: &Location) -> Parsed<i64> {
    fail_at(
        location.clone(),
        "the result does not fit 64 bits",
        "use smaller numbers",
    )
}
