// The names of TeX's symbols.

const table = text => Object.fromEntries(text.trim().split(/\s+/).map(pair => pair.split("=")));

export const SYMBOLS = table(`
alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ
lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ
chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
infty=∞ partial=∂ nabla=∇ ell=ℓ hbar=ℏ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅ varnothing=∅ angle=∠ top=⊤ bot=⊥
cdot=⋅ cdots=⋯ ldots=… dots=… dotsc=… dotsb=⋯ vdots=⋮ ddots=⋱ times=× div=÷ pm=± mp=∓ ast=∗ star=⋆
circ=∘ bullet=∙ oplus=⊕ otimes=⊗ odot=⊙ ominus=⊖ cap=∩ cup=∪ wedge=∧ vee=∨ land=∧ lor=∨ setminus=∖
leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠ equiv=≡ approx=≈ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ prec=≺
succ=≻ in=∈ notin=∉ ni=∋ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ subsetneq=⊊ forall=∀ exists=∃
nexists=∄ neg=¬ lnot=¬ to=→ rightarrow=→ leftarrow=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐
Leftrightarrow=⇔ implies=⟹ impliedby=⟸ iff=⟺ mapsto=↦ longrightarrow=⟶ longleftarrow=⟵ uparrow=↑
downarrow=↓ hookrightarrow=↪ rightharpoonup=⇀ gets=← perp=⟂ parallel=∥ mid=∣ nmid=∤ vdash=⊢ models=⊨
therefore=∴ because=∵ square=□ blacksquare=■ triangle=△ diamond=⋄ dagger=† ddagger=‡ prime=′ degree=°
colon=: lbrace={ rbrace=} {={ }=} langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=| rvert=|
lVert=‖ rVert=‖ vert=| Vert=‖ |=‖ backslash=\\ %=% $=$ &=& #=# _=_ imath=ı jmath=ȷ wp=℘ triangleq=≜
coloneqq=≔ asymp=≍ doteq=≐ lesssim=≲ gtrsim=≳ bowtie=⋈ checkmark=✓
`);

export const LARGE = {
  ...table(`sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ bigoplus=⨁
bigotimes=⨂ bigvee=⋁ bigwedge=⋀ lim=lim max=max min=min sup=sup inf=inf argmax=argmax argmin=argmin
Pr=Pr det=det gcd=gcd`),
  limsup: "lim sup", liminf: "lim inf",
};

export const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth
log ln lg exp dim ker deg hom arg mod bmod`.split(/\s+/));

export const SPACES = {
  ",": "0.17em", ":": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.33em", quad: "1em",
  qquad: "2em", enspace: "0.5em", thinspace: "0.17em",
};

export const DELIMITERS = {
  "{": "{", "}": "}", "|": "‖", lbrace: "{", rbrace: "}", langle: "⟨", rangle: "⟩", lfloor: "⌊",
  rfloor: "⌋", lceil: "⌈", rceil: "⌉", vert: "|", Vert: "‖", lvert: "|", rvert: "|", lVert: "‖",
  rVert: "‖", backslash: "\\", uparrow: "↑", downarrow: "↓",
};

// The sign, and whether it stretches over its base.
export const ACCENTS = {
  hat: ["^", "false"], widehat: ["^", "true"], bar: ["‾", "false"], overline: ["‾", "true"],
  vec: ["→", "false"], overrightarrow: ["→", "true"], dot: ["˙", "false"], ddot: ["¨", "false"],
  tilde: ["~", "false"], widetilde: ["~", "true"], check: ["ˇ", "false"], underline: ["_", "true"],
};

const letters = (upper, lower, digits) => ({
  ranges: [["A", "Z", upper], ["a", "z", lower], ...(digits ? [["0", "9", digits]] : [])],
});
const bold = letters(0x1D400, 0x1D41A, 0x1D7CE);
const plain = { ranges: [] };

export const FONTS = {
  mathbf: bold, boldsymbol: bold, bm: bold, mathrm: plain, mathit: plain, mathsf: plain, rm: plain,
  mathtt: letters(0x1D670, 0x1D68A, 0x1D7F6),
  mathbb: { ...letters(0x1D538, 0x1D552, 0x1D7D8),
            exceptions: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" } },
  mathcal: { ...letters(0x1D49C, 0x1D4B6),
             exceptions: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ",
                           e: "ℯ", g: "ℊ", o: "ℴ" } },
  mathfrak: { ...letters(0x1D504, 0x1D51E),
              exceptions: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" } },
};
FONTS.mathscr = FONTS.mathcal;
